"""Patterns of layers: ``"gla*3, softmax"`` names the mixer of each layer and repeats until all layers are filled."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import groupby
from typing import Any

MOST = 1_000_000  # layers of one period, which is a list
_ENTRY = re.compile(r"\s*(?P<name>[A-Za-z_][\w.\-]*)\s*(?:\*\s*(?P<count>\d+))?\s*")


def parse(text: str, argument: str) -> list[str]:
    """Parse a pattern to the names of one period: ``"gla*3, softmax"`` -> gla, gla, gla, softmax. Errors name ``argument``."""
    if not isinstance(text, str):
        raise TypeError(f'{argument} must be a pattern such as "gla*3, softmax", but came as {type(text).__name__}')
    names: list[str] = []
    for entry in text.split(","):
        match = _ENTRY.fullmatch(entry)
        if match is None:
            raise ValueError(f'{argument} must be names with optional counts such as "gla*3, softmax", but came as {text!r}')
        count = int(match["count"] or 1)
        if count < 1:
            raise ValueError(f"{argument} must have counts of at least 1, but {entry.strip()!r} has {count} in {text!r}")
        if len(names) + count > MOST:
            raise ValueError(f"{argument} may name at most {MOST:,} layers, but {entry.strip()!r} asks for {count:,}")
        names += [match["name"]] * count
    return names


def fill(names: list[str], layers: int) -> list[str]:
    """Repeat ``names`` until ``layers`` are filled; a last period may stay incomplete."""
    return [names[i % len(names)] for i in range(layers)]


def written(names: Iterable[str]) -> str:
    """Write ``names`` as a pattern: gla, gla, softmax -> ``"gla*2, softmax"``."""
    runs = [(name, len(list(same))) for name, same in groupby(names)]
    return ", ".join(name if count == 1 else f"{name}*{count}" for name, count in runs)


def halves(first: str, second: str, layers: Any) -> str:
    """Pattern of ``layers`` with ``first`` in the first half, rounded up, and ``second`` in the rest."""
    if not isinstance(layers, int) or layers < 2:  # one layer, or an invalid number, which the config reports
        return first
    return f"{first}*{layers - layers // 2}, {second}*{layers // 2}"
