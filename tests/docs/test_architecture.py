"""The page on the architecture names places that are there."""

import re
from importlib import import_module

import pytest

from tests.packaging.tree import ROOT

PAGE = (ROOT / "docs/architecture.rst").read_text(encoding="utf-8")
PLACES = sorted(set(re.findall(r"``(linattn(?:\.\w+)*):(\w+)``", PAGE)))


@pytest.mark.parametrize(("module", "name"), PLACES, ids=lambda part: part)
def test_a_place_is_there(module, name):
    if ".triton" in module:
        pytest.importorskip("triton")
    assert hasattr(import_module(module), name)


def test_there_are_places_and_files():
    assert len(PLACES) > 20
    for path in re.findall(r"``(linattn/[\w/.]+)``", PAGE):
        assert (ROOT / path).exists(), path
