"""The pages build without a warning or a broken link."""

import re
import subprocess
import sys

import pytest
from filelock import FileLock
from typer.exceptions import TyperException
from typer.main import get_command

import linattn
from linattn.cli.main import COMMANDS, app
from tests.atlas import browser
from tests.docs import markdown, pages
from tests.packaging.tree import ROOT

DOCS = ROOT / "docs"
PAGES = sorted(path for form in ("*.md", "*.rst") for path in DOCS.rglob(form) if "registry" not in path.parts)
PROGRAMS = [path for path in PAGES if markdown.python(path).strip() and path.parent.name != "zh"]  # the Chinese pages have the same code
NAMES = [str(path.relative_to(DOCS)) for path in PAGES]
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_every_mixer_has_a_page_and_every_command_a_section(site):
    assert {path.stem for path in (site / "registry").glob("*.html")} == {"index", *linattn.mixers.available()}
    page = (site / "registry/gla.html").read_text(encoding="utf-8")
    assert all(words in page for words in ("2312.06635", "<math", "Option tau", "linattn.mixers."))
    assert "the decay is a sigmoid to the power 1 / tau" in page
    raw = [
        path.stem for path in (site / "registry").glob("*.html") if re.search("``|:class:|:func:|:meth:", path.read_text(encoding="utf-8"))
    ]
    assert raw == []
    commands = (DOCS / "command_line.rst").read_text(encoding="utf-8")
    assert {*re.findall(r"^\.\. help:: (\w+)$", commands, re.M)} == {*COMMANDS}


@pytest.mark.slow
def test_signatures_are_read(site):
    """Sphinx shows unparsable signatures verbatim, with tildes before the names of types."""
    raw = re.compile(r"&lt;factory&gt;|~(?:typing|pathlib|collections|torch|linattn)\b")
    assert [path.name for path in site.glob("*.html") if raw.search(path.read_text(encoding="utf-8"))] == []


PHONE = "index start zh/index zh/start guides/op guides/migrate benchmarks benchmarks.zh studies convert".split()
WIDE = """[...document.querySelectorAll("article table")].map((table) => table.parentElement)
    .filter((box) => box.scrollWidth > box.clientWidth + 1).length"""
TITLES = "[...document.querySelectorAll('.wide td:nth-child(2)')].map((cell) => getComputedStyle(cell, '::before').content)"


@pytest.mark.slow
def test_tables_fit_a_phone(site):
    """Wide tables show each row as a box with the columns' titles."""
    browser.needed()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=browser.CHROMIUM, args=["--no-sandbox"])
        tab = chromium.new_page(viewport={"width": 390, "height": 844})
        for name in PHONE:
            tab.goto((site / f"{name}.html").as_uri())
            assert tab.evaluate("document.documentElement.scrollWidth") <= 390 and tab.evaluate(WIDE) == 0, name
        assert '"softmax layers"' in tab.evaluate(TITLES)
        chromium.close()


@pytest.mark.slow
@pytest.mark.parametrize("page", PROGRAMS, ids=lambda path: path.stem)
def test_the_code_of_a_page_runs(page, tmp_path, programs):
    program = tmp_path / "page.py"
    program.write_text(markdown.python(page), encoding="utf-8")
    programs.run(tmp_path, program)


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_code_block_says_what_it_is(page):
    assert markdown.unnamed(page) == []
    assert {block.language for block in markdown.blocks(page)} <= {"python", "sh", "text", "json"}


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda path: path.stem)
def test_nobody_is_sent_to_an_index_for_an_extra(page):
    """linattn is not published yet; Start and the front page say how to install it."""
    found = re.findall(r"pip install ['\"]?linattn\[.*", page.read_text(encoding="utf-8"))
    assert found == []


def command_lines(path):
    """The arguments of ``linattn`` in each command of a page, with any launcher."""
    for words in markdown.commands(path):
        if "linattn" in words:
            yield words[words.index("linattn") + 1 :]


@pytest.mark.parametrize("page", [path for path in PAGES if [*command_lines(path)]], ids=lambda path: path.stem)
def test_the_commands_of_a_page_have_these_options(page):
    """Their effect is tested elsewhere; without the page's files only options can be parsed."""
    commands = get_command(app).commands
    for name, *words in command_lines(page):
        commands[name].make_context(name, words)


def test_a_command_with_a_wrong_option_is_found(tmp_path):
    page = tmp_path / "page.rst"
    page.write_text("Text\n\n.. code-block:: sh\n\n   torchrun -m linattn train --out x \\\n       --setps 3\n\nMore::\n\n   x\n")
    (words,) = command_lines(page)
    assert words == ["train", "--out", "x", "--setps", "3"] and markdown.unnamed(page) == ["More::"]
    with pytest.raises(TyperException, match="No such option: --setps"):
        get_command(app).commands["train"].make_context("train", words[1:])


def test_the_first_page_is_the_same_in_both_languages():
    english, chinese = DOCS / "start.md", DOCS / "zh/start.md"
    assert markdown.without_words(markdown.python(english)) == markdown.without_words(markdown.python(chinese))
    assert markdown.commands(english) == markdown.commands(chinese)
