"""Every registered sequence mixer, the project's and third parties', against every check. No line here names a mixer."""

from __future__ import annotations

from functools import partial

import pytest

import linattn.mixers
from tests.conformance.checks import CHECKS, verify

MIXERS = [name for name in linattn.mixers.available() if linattn.mixers.info(name).kind == "sequence"]


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("mixer", MIXERS)
def test_mixer(mixer: str, check: str) -> None:
    verify(check, partial(linattn.mixers.create, mixer), linattn.mixers.info(mixer).exemptions.get(check))
