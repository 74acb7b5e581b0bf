"""Largest relative errors between each mixer and its oracle, as its tests recorded them.

``python -m tests.oracles.record`` rewrites them, in a checkout.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

FILE = Path(__file__).with_suffix(".json")


@dataclass(frozen=True)
class Errors:
    """Errors of outputs, states and gradients found by a file of tests, ‖ours − theirs‖ / ‖theirs‖ each.

    Args:
        test: the file, in a checkout.
        comparisons: number of comparisons.
        largest: the largest error by the precision of the comparison, "float64" for example: of the less precise side.
    """

    test: str
    comparisons: int
    largest: dict[str, float]

    def told(self) -> str:
        """Summarise the errors in one line."""
        largest = ", ".join(f"{error:.1e} in {dtype}" for dtype, error in self.largest.items())
        count = "the only comparison" if self.comparisons == 1 else f"the largest of {self.comparisons:,} comparisons"
        return f"{largest} ({count}, {self.test})"


def measured_errors(name: str) -> Errors | None:
    """Errors of the mixer ``name``; None if none are recorded, as for every plugin."""
    entry = _recorded().get(name)
    return None if entry is None else Errors(**entry)


@cache
def _recorded() -> dict[str, dict]:
    return json.loads(FILE.read_text(encoding="utf-8"))
