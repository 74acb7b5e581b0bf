"""The pages on the architecture and on decoding, and the figure, name functions and files that exist."""

import json
import re
from importlib import import_module

import pytest

from tests.packaging.tree import ROOT

PAGE = "".join((ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("architecture.rst", "decoding.rst"))
PLACES = sorted(set(re.findall(r"``(linattn(?:\.\w+)*):(\w+)``", PAGE)))


@pytest.mark.parametrize(("module", "name"), PLACES, ids=lambda part: part)
def test_a_place_is_there(module, name):
    if ".triton" in module:
        pytest.importorskip("triton")
    assert hasattr(import_module(module), name)


def test_functions_in_the_figure_are_on_the_page():
    figure = (ROOT / "docs/images/architecture.svg").read_text(encoding="utf-8")
    dotted = re.findall(r">(\w+)\.(\w+)</text>", figure)
    assert len(dotted) >= 2
    for module, name in dotted:
        assert (f"linattn.ops.{module}", name) in PLACES, f"{module}.{name}"


def test_there_are_places_and_files():
    assert len(PLACES) > 20
    for path in re.findall(r"``((?:linattn|tests)/[\w/.]+)``", PAGE):
        assert (ROOT / path).exists(), path


def test_measures_on_the_page_are_those_of_the_file():
    revisions = json.loads((ROOT / "benchmarks" / "results" / "source.json").read_text(encoding="utf-8"))["revisions"]
    before, now = (figures({name: x for name, x in one.items() if name != "date"}) for one in revisions.values())
    rows = re.findall(r"   \* - (.*)\n     - (.*)\n     - (.*)\n", PAGE)
    assert rows[1:] == [(name, before[name], now[name]) for name in now]


def figures(measures, name=""):
    """The measures by name, prefixed by their group's name."""
    if not isinstance(measures, dict):
        return {name: f"{measures:,}"}
    found = {}
    for part, value in measures.items():
        found |= figures(value, f"{name}, {part}" if name else part)
    return found
