"""Every registered mixer, the project's and third parties', against every check of its kind. No line here names a mixer."""

from __future__ import annotations

import pytest

import linattn.mixers
from tests.conformance.checks import HALVES, exemption, halves, verify

INFOS = list(map(linattn.mixers.info, linattn.mixers.available()))
FIRST = {info.cls.__module__.rpartition(".")[0]: info for info in reversed(INFOS)}.values()  # of each folder


def slow(info, check):
    """Compiling takes a second for each mixer, and another for each layout."""
    return check == "compile_layouts" or (check == "compile" and info not in FIRST)


def case(info, half, make, check):
    name = f"{info.name}-{check}" if half == "sequence" else f"{info.name}-{half}.{check}"
    return pytest.param(info, half, make, check, id=name, marks=pytest.mark.slow if slow(info, check) else ())


CASES = [case(info, half, make, check) for info in INFOS for half, make in halves(info).items() for check in HALVES[half]]


@pytest.mark.parametrize(("info", "half", "make", "check"), CASES)
def test_mixer(info, half, make, check) -> None:
    verify(check, make, exemption(info, half, check), half)
