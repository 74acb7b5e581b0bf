"""Sweeps split between `make test` and `make test-slow`: mixers, and combinations of parameters."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import product

import pytest

from linattn import mixers


def first(names: Iterable[str]) -> Collection[str]:
    """The first of ``names`` in each folder of mixers."""
    return {mixers.info(name).cls.__module__.rpartition(".")[0]: name for name in reversed(list(names))}.values()


def swept(names: Iterable[str]) -> list:
    """Each of ``names`` as a parameter, slow where its folder has an earlier one."""
    names = list(names)
    quick = first(names)
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]


def halved(*choices: Sequence, rest: object = pytest.mark.slow) -> list:
    """All combinations of one of each of ``choices``. Every second one has the marks ``rest``; the others contain each pair."""
    rows = [tuple(zip(*row, strict=True)) for row in product(*map(enumerate, choices))]
    return [row if sum(places) % 2 == 0 else pytest.param(*row, marks=rest) for places, row in rows]
