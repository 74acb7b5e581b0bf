"""Drawings for papers: standalone files with the ops' numbers, equal to the pages'."""

import importlib.util
import os
import re
import xml.etree.ElementTree as ET
from functools import cache
from pathlib import Path

import pytest

import linattn.atlas.draw as drawing
from linattn import mixers
from linattn.atlas import image
from linattn.atlas.draw import KINDS, draw
from linattn.atlas.inspection import inspect_mixer
from linattn.atlas.page import rounded
from linattn.cli.main import main
from tests.sweeps import swept

SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize(("name", "what"), [*(("gla", kind) for kind in KINDS), ("softmax", "state"), ("rwkv6", "cell"), ("lstm", "cell")])
def test_files_stand_alone(name, what):
    svg = draw(name, what)
    root = ET.fromstring(svg)
    assert root.tag == f"{SVG}svg" and (root.get("aria-label") or root.get("aria-labelledby"))
    assert "var(" not in svg and "color-mix" not in svg and "http" not in svg.replace("http://www.w3.org/2000/svg", "")
    assert not re.search("[\u4e00-\u9fff]", svg)
    assert re.search("[\u4e00-\u9fff]", draw(name, what, language="zh"))


@pytest.mark.parametrize("name", swept(mixers.available()))
def test_every_system_is_drawn_or_says_what_it_lacks(name, monkeypatch):
    monkeypatch.setattr(drawing, "inspect_mixer", cache(inspect_mixer))
    ET.fromstring(draw(name, "cell"))
    for what, there in (("mask", inspect_mixer(name).matrix), ("state", inspect_mixer(name).states)):
        if there is None:
            with pytest.raises(ValueError, match=f"^{name} has no (matrix|state) to draw: .{{20}}"):
                draw(name, what)
        else:
            assert cells(draw(name, what))


def test_the_two_schemes_differ_in_colours_alone():
    light, dark = (draw("kda", "cell", scheme=scheme) for scheme in ("light", "dark"))
    colour = re.compile("#[0-9a-f]{6}")
    assert light != dark and colour.sub("", light) == colour.sub("", dark)


@pytest.mark.parametrize(("figure", "name", "what"), [("cell", "kda", "cell"), ("mask", "gla", "mask"), ("cost", "gla", "cost")])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_figures_of_the_readme_are_not_old(figure, name, what, scheme):
    """``make figures`` updates them."""
    path = Path(__file__).parents[2] / "docs" / "images" / f"{figure}-{scheme}.svg"
    number = re.compile(r"-?\d+\.?\d*(?:e-?\d+)?")
    found, wanted = path.read_text(encoding="utf-8"), draw(name, what, scheme=scheme)
    assert number.sub("", found) == number.sub("", wanted)
    values = [[float(x) for x in number.findall(svg)] for svg in (found, wanted)]
    assert values[0] == pytest.approx(values[1], rel=6e-3, abs=0.0101)


def cells(svg):
    return [float(node.get("data-value")) for node in ET.fromstring(svg).iter(f"{SVG}rect")]


def test_numbers_are_the_mixer_s():
    seen = inspect_mixer("gla")
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
        (("glaa", "cell"), "did you mean 'gla'"),
    ],
)
def test_refusals(args, says):
    with pytest.raises(ValueError, match=says):
        draw(*args)


def test_bad_heads_and_languages_are_refused():
    for bad in ({"head": 4}, {"head": -1}, {"language": "fr"}, {"scheme": "sepia"}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            draw("gla", "mask", **bad)


def test_the_door(tmp_path, capsys):
    assert main(["draw", "gla", "--what", "mask", "-o", str(tmp_path / "gla.svg")]) == 0
    assert (tmp_path / "gla.svg").read_text(encoding="utf-8") == draw("gla", "mask")
    assert main(["draw", "gla"]) == 0 and capsys.readouterr().out == draw("gla", "cell")
    for place, says in ((tmp_path, "it is a folder"), (tmp_path / "none" / "x.svg", f"{tmp_path / 'none'} does not exist")):
        capsys.readouterr()
        assert main(["draw", "gla", "-o", str(place)]) == 2
        assert f"{place} cannot be written: {says}" in capsys.readouterr().err
    assert main(["draw", "lstm", "--what", "mask", "-o", str(tmp_path / "no.svg")]) == 2
    assert not (tmp_path / "no.svg").exists() and "no matrix" in capsys.readouterr().err


def test_a_pipe_is_written_to_and_stays_one(tmp_path):
    pipe = tmp_path / "pipe"  # like /dev/stdout and >(...), which must not be replaced by a file
    os.mkfifo(pipe)
    end = os.open(pipe, os.O_RDWR)  # a reader, so that the writer does not block
    assert main(["draw", "gla", "-o", str(pipe)]) == 0 and pipe.is_fifo()
    assert os.read(end, 1 << 16).decode() == draw("gla", "cell")
    os.close(end)


HEADS = {"png": b"\x89PNG\r\n", "pdf": b"%PDF-"}


@pytest.mark.parametrize("kind", HEADS)
def test_a_file_is_what_its_name_says(kind, tmp_path):
    if not image._rsvg() and not importlib.util.find_spec("cairosvg"):
        pytest.skip("neither rsvg-convert nor cairosvg is installed")
    path = tmp_path / f"gla.{kind}"
    assert main(["draw", "gla", "-o", str(path)]) == 0
    assert path.read_bytes().startswith(HEADS[kind]) and [p.name for p in tmp_path.iterdir()] == [path.name]


def test_what_cannot_be_written_is_refused_in_a_line_and_leaves_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(image.shutil, "which", lambda _: None)
    monkeypatch.setattr(image.importlib.util, "find_spec", lambda _: None)
    for name, says in (
        ("gla.png", "needs rsvg-convert"),
        ("gla.pdf", "needs rsvg-convert"),
        ("gla.jpg", "must be a file that ends in .svg"),
    ):
        assert main(["draw", "gla", "-o", str(tmp_path / name)]) == 2
        err = capsys.readouterr().err
        assert says in err and err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_converter_that_fails_is_told(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(image, "_rsvg", lambda: "false")
    assert main(["draw", "gla", "-o", str(tmp_path / "gla.png")]) == 2
    assert "rsvg-convert could not write png" in capsys.readouterr().err and list(tmp_path.iterdir()) == []
