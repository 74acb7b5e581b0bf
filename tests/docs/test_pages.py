"""The API pages build without a warning, and every link on them leads somewhere."""

import subprocess
import sys

import pytest

from tests.docs import pages
from tests.packaging.tree import ROOT

PUBLIC = ["linear_attention", "diagonal_scan", "running_max", "explain", "debug", "cost", "mixing_matrix", "check_forms", "State", "load"]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    out = tmp_path_factory.mktemp("site")
    words = ["-m", "sphinx", "-b", "html", "-W", "--keep-going", "-q", "-d", out / "doctrees", ROOT / "docs", out / "html"]
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return out / "html"


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
