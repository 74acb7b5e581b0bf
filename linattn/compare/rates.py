"""Learning rates of a comparison on text, from a sweep over the default mixers at the default size."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from linattn.experiment.study import mean_and_spread

USUAL = 4e-3  # rate of mixers that are not in the sweep


SWEEP = Path(__file__).with_name("learning_rates.json")  # a copy of benchmarks/results/learning-rates.json


@cache
def sweep() -> dict[str, Any]:
    """Results of ``python -m benchmarks.learning_rates``: its machine, date and settings, and a row for every run; {} if there are none."""
    return json.loads(SWEEP.read_text(encoding="utf-8")) if SWEEP.exists() else {}


def swept(mixer: str) -> list[dict[str, Any]]:
    """Validation bits per byte of ``mixer`` at each learning rate of the sweep, ascending; empty if the mixer is not in the sweep."""
    return tried([row for row in sweep().get("rows", []) if row["mixer"] == mixer])


def tried(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The mean and spread over the seeds of ``validation_bits_per_byte`` at each ``learning_rate`` of ``rows``, ascending."""
    key, rates = "validation_bits_per_byte", sorted({row["learning_rate"] for row in rows})
    return [{"learning_rate": rate, **mean_and_spread(key, [row[key] for row in rows if row["learning_rate"] == rate])} for rate in rates]


def chosen(mixer: str) -> float:
    """The learning rate at which ``mixer`` validates best in the sweep; :data:`USUAL` if the mixer is not in the sweep."""
    return best(found) if (found := swept(mixer)) else USUAL


def best(found: list[dict[str, Any]]) -> float:
    """The learning rate with the fewest bits per byte."""
    return min(found, key=lambda one: one["validation_bits_per_byte"])["learning_rate"]
