"""Checks of mixers by kind: functions of a factory that raise AssertionError.

Sequence mixers have two halves: ``CHECKS`` for causal ones, "bidirectional" for those whose tokens read all others; a mixer that
is both, by its option ``causal``, must pass both. An exemption from a check of another half than the causal one has the half's name
before it: ``"cross.rows"``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from linattn import mixers
from linattn.mixers.registry import Info
from tests.conformance.checks import bidirectional, calls, cross, engines, feed_forward, grid, outputs, papers, resample, states
from tests.conformance.tools import Make


def _checks(*homes: object) -> dict[str, Callable[[Make], None]]:
    return {n.removeprefix("check_"): f for home in homes for n, f in vars(home).items() if n.startswith("check_")}


def _without(checks: dict[str, Callable[[Make], None]], *names: str) -> dict[str, Callable[[Make], None]]:
    return {name: check for name, check in checks.items() if name not in names}


CHECKS = _checks(papers, outputs, states, engines)
HALVES = {
    "sequence": CHECKS,
    "bidirectional": _checks(papers, calls, bidirectional),
    "cross": _checks(papers, calls, cross),
    "grid": _checks(papers, calls, grid),
    "resample": _without(_checks(papers, calls, resample), "mixing_matrix"),
    "feed-forward": _without(_checks(papers, calls, feed_forward), "mixing_matrix", "reach"),
}
WRAPPERS = ("ddp", "fsdp2")  # run together for all mixers, by tests/conformance/test_distributed.py
NAMES = (*CHECKS, *WRAPPERS, *(f"{half}.{check}" for half, checks in HALVES.items() if half != "sequence" for check in checks))


def halves(info: Info) -> dict[str, Make]:
    """The halves that a registered mixer must pass, with a factory for each."""
    if info.kind != "sequence":
        return {info.kind: partial(mixers.create, info.name)}
    found: dict[str, Make] = {"sequence": partial(mixers.create, info.name)} if info.causal else {}
    return found | ({"bidirectional": partial(mixers.create_bidirectional, info.name)} if info.bidirectional else {})


def exemption(info: Info, half: str, check: str) -> str | None:
    """Reason for the mixer's exemption from the check; None without one."""
    return info.exemptions.get(check if half == "sequence" else f"{half}.{check}")


def verify(check: str, make: Make, exemption: str | None, half: str = "sequence") -> None:
    """Run one check; an exempt mixer must fail it, else its exemption is stale."""
    if exemption is None:
        HALVES[half][check](make)
        return
    try:
        HALVES[half][check](make)
    except (Exception, pytest.fail.Exception):  # any failure is expected
        pytest.xfail(exemption)
    pytest.fail(f"{check} passes: the exemption ({exemption}) is stale")
