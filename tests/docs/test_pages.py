"""The API pages build without a warning, and every link on them leads somewhere."""

import re
import subprocess
import sys

import pytest
from filelock import FileLock

import linattn
from linattn.cli.main import COMMANDS
from tests.docs import markdown, pages
from tests.packaging.tree import ROOT

GUIDES = ["start", *(f"guides/{name}" for name in ("op", "own_mixer", "hugging_face", "states", "migrate"))]
PUBLIC = ["linear_attention", "diagonal_scan", "running_max", "explain", "debug", "cost", "mixing_matrix", "check_forms", "State", "load"]


@pytest.fixture(scope="module")
def site(tmp_path_factory, request):
    """The site, built once for all workers."""
    base = tmp_path_factory.getbasetemp()
    base = base.parent if hasattr(request.config, "workerinput") else base
    out = base / "site"
    with FileLock(base / "site.lock"):
        if not (out / "complete").exists():
            built(out)
            (out / "complete").touch()
    return out / "html"


def built(out):
    words = ["-m", "sphinx", "-b", "html", "-W", "-n", "--keep-going", "-q", "-d", out / "doctrees", ROOT / "docs", out / "html"]
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_links_lead_somewhere_and_nothing_is_loaded_from_elsewhere(site):
    assert pages.broken(site) == []
    assert pages.foreign(site) == []
    anchors = set().union(*(pages.Page(path).anchors for path in site.rglob("*.html")))
    assert {f"linattn.{name}" for name in PUBLIC} <= anchors


def test_a_broken_link_is_found(tmp_path):
    (tmp_path / "a.html").write_text('<a href="b.html#here">b</a><a href="#top">x</a><a href="c.html">c</a><img src="http://x.y/z.png">')
    (tmp_path / "b.html").write_text('<p id="there"></p><a href="a.html">a</a><a href="https://elsewhere.org/page">e</a>')
    assert sorted(pages.broken(tmp_path)) == ["a.html: #top", "a.html: b.html#here", "a.html: c.html"]
    assert pages.foreign(tmp_path) == ["a.html: http://x.y/z.png"]


def test_every_mixer_has_a_page_and_every_command_a_section(site):
    assert {path.stem for path in (site / "registry").glob("*.html")} == {"index", *linattn.mixers.available()}
    page = (site / "registry/gla.html").read_text(encoding="utf-8")
    assert all(words in page for words in ("2312.06635", "<math", "Option tau", "linattn.mixers."))
    commands = (ROOT / "docs/command_line.rst").read_text(encoding="utf-8")
    assert {*re.findall(r"^\.\. help:: (\w+)$", commands, re.M)} == {*COMMANDS}


@pytest.mark.parametrize("page", GUIDES)
def test_the_code_of_a_guide_runs(page, tmp_path):
    program = tmp_path / "guide.py"
    program.write_text(markdown.python(ROOT / f"docs/{page}.md"), encoding="utf-8")
    done = subprocess.run([sys.executable, "-W", "error", program], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(program.read_text(encoding="utf-8").split()) > 20


def test_guides_are_complete():
    """A page with code is among those that are run."""
    found = {
        str(path.relative_to(ROOT / "docs").with_suffix("")) for path in (ROOT / "docs").rglob("*.md") if markdown.python(path).strip()
    }
    assert found == {*GUIDES, "zh/start"}


def test_the_first_page_is_the_same_in_both_languages():
    english, chinese = ROOT / "docs/start.md", ROOT / "docs/zh/start.md"
    assert markdown.without_words(markdown.python(english)) == markdown.without_words(markdown.python(chinese))
    assert markdown.commands(english) == markdown.commands(chinese)
