"""Tests of every mixer, of which `make test` takes one mixer of each folder, and `make test-slow` the others."""

from __future__ import annotations

from collections.abc import Collection, Iterable

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
