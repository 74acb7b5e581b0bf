"""Every registered mixer, the project's and third parties', against every check of its kind. No line here names a mixer."""

from __future__ import annotations

import pytest

import linattn.mixers
from tests.conformance.checks import HALVES, exemption, halves, verify

SLOW = ("compile_layouts",)  # a second for each mixer and layout


def case(info, half, make, check):
    name = f"{info.name}-{check}" if half == "sequence" else f"{info.name}-{half}.{check}"
    return pytest.param(info, half, make, check, id=name, marks=pytest.mark.slow if check in SLOW else ())


CASES = [
    case(info, half, make, check)
    for info in map(linattn.mixers.info, linattn.mixers.available())
    for half, make in halves(info).items()
    for check in HALVES[half]
]


@pytest.mark.parametrize(("info", "half", "make", "check"), CASES)
def test_mixer(info, half, make, check) -> None:
    verify(check, make, exemption(info, half, check), half)
