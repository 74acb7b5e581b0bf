"""What every sequence mixer must hold to, each a function of a factory that raises AssertionError."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest

from tests.conformance.checks import engines, outputs, papers, states
from tests.conformance.tools import Make


def _checks(*modules: ModuleType) -> dict[str, Callable[[Make], None]]:
    return {n.removeprefix("check_"): f for m in modules for n, f in vars(m).items() if n.startswith("check_")}


CHECKS = _checks(papers, outputs, states, engines)
WRAPPERS = ("ddp", "fsdp2")  # run together for all mixers, by tests/conformance/test_distributed.py
NAMES = (*CHECKS, *WRAPPERS)


def verify(check: str, make: Make, exemption: str | None) -> None:
    """Run one check; one that a mixer is exempt from must fail, else its exemption is stale."""
    if exemption is None:
        CHECKS[check](make)
        return
    try:
        CHECKS[check](make)
    except Exception:  # whatever it fails with, it was announced
        pytest.xfail(exemption)
    pytest.fail(f"{check} passes: the exemption ({exemption}) is stale")
