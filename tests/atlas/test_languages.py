"""Texts of the atlas and of results: all in English and Chinese."""

import re

import pytest

from linattn import mixers
from linattn.atlas import inspection, measured
from linattn.atlas.build import Atlas
from linattn.atlas.chinese import both, equation
from linattn.compare import tasks
from linattn.reproduce.ledger import load
from linattn.reproduce.options import STUDIES
from tests.atlas.test_build import writing

# Not English: commands, packages with versions, and words with a capital, a digit or code characters.
NAMED = re.compile(r"linattn reproduce [^,]*|idiap/fast-transformers|[\w-]+ (?:\d+\.\d+\.\d+|\d{6})\b|\S*[A-Z\d_=*]\S*|\w+\.[\w.]+")
NAMES = ("linattn", "fla", "torch", "transformers", "softmax", "delta", "retention", "token", "torchscale", "ms", "heads", "window")


def english(chinese):
    """English words in Chinese text, except names of systems and libraries."""
    plain = NAMED.sub(" ", re.sub("[，。；：（）]", " ", chinese))
    return [word for word in re.findall(r"[a-z][a-z']+", plain) if word not in NAMES and word not in mixers.available()]


def assert_told(*texts, own=None):
    """Assert that every text of the library beside the atlas has Chinese."""
    missing = {text: words for text in texts if (words := english(both(text, own).zh))}
    assert missing == {}, "`chinese` of the registration, or linattn/atlas/chinese.py, lacks these or words of them"


def test_what_is_not_translated_is_found():
    assert both("right up to 3 tokens at most") == ("right up to 3 tokens at most",) * 2
    assert english(both("right up to 3 tokens at most").zh) == ["right", "up", "to", "tokens", "at", "most"]
    assert english(both("arXiv 2102.11174, chapter 4.1").zh) == ["chapter"]
    assert english(both("fla-core 0.6.0, naive_x; gated, token by token in float64").zh) == ["gated"]
    assert both("0.53 at 5k, 0.77 at 18k").zh == "5k 个数时 0.53，18k 个数时 0.77"
    with pytest.raises(AssertionError, match="chinese.py, lacks"):
        assert_told("no more than it was")


def test_everything_measured_is_told_in_both_languages():
    """Titles, headings, sources and cells of all that the checkout's results say of any system."""
    atlas, cells = Atlas(tuple(mixers.available()), writing._results(None)), set()
    for name in mixers.available():
        for table in measured.of(atlas, inspection.Inspection(mixers.info(name), {})):
            assert [w for words in (table.title, *table.heads) for w in english(words.zh)] == [], (name, table.title)
            cells.update((table.source,), *table.rows)
    assert len(cells) > 500
    assert_told(*cells)


def test_systems_studies_and_tasks_are_told_in_both_languages():
    for info in (mixers.info(name) for name in mixers.available()):
        assert_told(info.title, info.oracle, *info.exemptions.values(), own=info.chinese)
        assert not re.search(r"\\text\{[^}]*[a-z]{2}", equation(info.equation, info.chinese).zh.replace("token", "")), (
            f"`chinese` lacks words in {info.equation}"
        )
    for study in (load(name) for name in STUDIES):
        assert_told(study.title, *(column.heading for column in study.all_columns))
    for task in (tasks.load(name) for name in tasks.TASKS):
        assert_told(task.title, *(f.heading for f in task.figures))
