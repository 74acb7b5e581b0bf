"""Drawings for papers: whole files of their own, with the numbers of the ops, the same as on the pages."""

import re
import xml.etree.ElementTree as ET

import pytest

from linattn import mixers
from linattn.atlas.draw import KINDS, draw
from linattn.atlas.look import look
from linattn.atlas.page import rounded
from linattn.cli.main import main

SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize(("name", "what"), [*(("gla", kind) for kind in KINDS), ("softmax", "state"), ("rwkv6", "cell"), ("lstm", "cell")])
def test_files_stand_alone(name, what):
    svg = draw(name, what)
    root = ET.fromstring(svg)
    assert root.tag == f"{SVG}svg" and (root.get("aria-label") or root.get("aria-labelledby"))
    assert "var(" not in svg and "color-mix" not in svg and "http" not in svg.replace("http://www.w3.org/2000/svg", "")
    assert not re.search("[\u4e00-\u9fff]", svg)
    assert what == "cost" or re.search("[\u4e00-\u9fff]", draw(name, what, language="zh"))


@pytest.mark.parametrize("name", mixers.available())
def test_every_system_has_a_cell(name):
    ET.fromstring(draw(name, "cell"))


def cells(svg):
    return [float(node.get("data-value")) for node in ET.fromstring(svg).iter(f"{SVG}rect")]


def test_numbers_are_the_mixer_s():
    seen = look("gla")
    lower = [value for i, row in enumerate(seen.matrix[2]) for value in row[: i + 1]]
    assert cells(draw("gla", "mask", head=2)) == pytest.approx(lower, rel=6e-3)
    assert cells(draw("gla", "state", head=1)) == pytest.approx([v for row in seen.states.values[-1][1] for v in row], rel=6e-3)
    strongest = max(abs(v) for head in seen.matrix for row in head for v in row)
    node = next(ET.fromstring(draw("gla", "mask")).iter(f"{SVG}rect"))
    assert float(node.get("fill-opacity")) == round(abs(seen.matrix[0][0][0]) / strongest, 2)
    assert rounded(seen.matrix)[0][0][0] == pytest.approx(cells(draw("gla", "mask"))[0], rel=5e-3)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("lstm", "mask"), "lstm has no matrix to draw"),
        (("agent", "state"), "agent has no state to draw: it takes all tokens at once"),
        (("agent", "cost"), "keeps nothing"),
        (("gla", "moon"), "what must be one of cell, mask, state, cost"),
        (("gal", "cell"), "did you mean 'gla'"),
    ],
)
def test_refusals(args, says):
    with pytest.raises(ValueError, match=says):
        draw(*args)


def test_bad_heads_and_languages_are_refused():
    for bad in ({"head": 4}, {"head": -1}, {"language": "fr"}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            draw("gla", "mask", **bad)


def test_the_door(tmp_path, capsys):
    assert main(["draw", "gla", "--what", "mask", "-o", str(tmp_path / "gla.svg")]) == 0
    assert (tmp_path / "gla.svg").read_text(encoding="utf-8") == draw("gla", "mask")
    assert main(["draw", "gla"]) == 0 and capsys.readouterr().out == draw("gla", "cell")
    assert main(["draw", "lstm", "--what", "mask", "-o", str(tmp_path / "no.svg")]) == 2
    assert not (tmp_path / "no.svg").exists() and "no matrix" in capsys.readouterr().err
