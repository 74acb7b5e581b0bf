"""Pairs of sentences: from files, with bad lines counted, and from the handbook's pages."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from linattn.data.pairs import HANDBOOK, handbook, read_pairs

PAGE = "<html><body><p>skip</p><h1>{}</h1><div class='para'>{} <code>{}</code></div><div class='other'>no</div></body></html>"


def test_a_file(tmp_path):
    path = tmp_path / "pairs.tsv"
    path.write_bytes("\ufeffone\tUNO\n\nno tab\ntwo\tDOS\t3\n\tempty\nthree\t三\n".encode() + b"bad\t\xff\none\tUNO\n")
    read = read_pairs(path)
    assert read.pairs == [("one", "UNO"), ("three", "三")] and (read.bad, read.bad_lines) == (4, [3, 4, 5, 7])
    assert read.told() == "4 lines were left out (line 3, 4, 5, 7): a line is a source, a tab and its target"


@given(st.binary(max_size=60))
def test_no_file_is_too_bad(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("pairs") / "pairs.tsv"
    path.write_bytes(b"a\tb\n" + content)
    assert read_pairs(path).pairs[0] == ("a", "b")


def test_what_holds_no_pairs_is_refused(tmp_path):
    (tmp_path / "none").write_text("a b\n")
    with pytest.raises(ValueError, match="has no line with a source, a tab and its target"):
        read_pairs(tmp_path / "none")
    with pytest.raises(IsADirectoryError):
        read_pairs(tmp_path)
    with pytest.raises(FileNotFoundError, match="apt install debian-handbook"):
        handbook(tmp_path)


def pages(folder, name, english, chinese):
    for language, text in (("en-US", english), ("zh-CN", chinese)):
        (folder / language).mkdir(exist_ok=True)
        (folder / language / name).write_text(text, encoding="utf-8")


def test_pages_are_paired_paragraph_by_paragraph_and_sentence_by_sentence(tmp_path):
    pages(tmp_path, "a.html", PAGE.format("The title", "One. Two &amp; more!", "cat"), PAGE.format("标题", "一。二！", "cat"))
    pages(tmp_path, "b.html", PAGE.format("Another", "Not translated.", "x"), PAGE.format("另一个", "Not translated.", "x"))
    pages(tmp_path, "c.html", PAGE.format("Lost", "More here.", "x") + "<p>more</p>", PAGE.format("多", "少", "x"))
    assert handbook(tmp_path).pairs == [
        ("The title", "标题"), ("One. Two & more! cat", "一。二！ cat"), ("Another", "另一个"),
    ]  # fmt: skip
    pages(tmp_path, "a.html", "<p>One thing. Another thing.</p>", "<p>一。二。</p>")
    assert handbook(tmp_path).pairs[:2] == [("One thing.", "一。"), ("Another thing.", "二。")]


@pytest.mark.skipif(not HANDBOOK.is_dir(), reason="Debian's package debian-handbook is not installed")
def test_the_handbook_that_is_installed():
    read = handbook()
    assert len(read.pairs) > 1000 and read.pairs[0][0].isascii()
