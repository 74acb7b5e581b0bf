"""Text becomes two token files, atomically; invalid text gives a one-line error."""

import json
import math
import os
from pathlib import Path

import numpy as np
import pytest

from linattn.data import corpus, sources
from linattn.data import corpus as corpus_function
from linattn.data.corpus import STRETCH, _stretches

TEXT = "Die Zeit heilt alle Wunden. 时间会治愈一切。 🎉 def f(x): return x\n" * 40


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "linattn" / "corpora"


@pytest.fixture
def text(tmp_path) -> Path:
    path = tmp_path / "a.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory) -> Path:
    from tokenizers import ByteLevelBPETokenizer

    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator([TEXT], vocab_size=300, min_frequency=2, show_progress=False)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    bpe.save(str(path))
    return path


def test_every_byte_is_in_one_split(text):
    c = corpus([text])
    assert len(c.train) + len(c.validation) == len(TEXT.encode())
    pieces = [(split, piece) for split, piece in _stretches(TEXT.encode())]
    assert b"".join(piece for _, piece in pieces) == TEXT.encode()
    for split in ("train", "validation"):
        assert bytes(getattr(c, split)) == b"".join(piece for s, piece in pieces if s == split)
    assert c.vocab_size == 256
    assert 0.03 < len(c.validation) / len(TEXT.encode()) < 0.07


@pytest.mark.parametrize("character", ["é", "时", "🎉"])
def test_no_character_is_cut(character):
    for count in range(400, 420):
        for _, piece in _stretches(("x" + character * count).encode()):
            piece.decode()


@pytest.mark.parametrize("size", [400, 5000, 20 * STRETCH + 1, 60 * STRETCH])
def test_a_twentieth_is_for_validation(size):
    counts = {"train": 0, "validation": 0}
    for split, piece in _stretches(b"x" * size):
        counts[split] += len(piece)
    assert abs(counts["validation"] / size - 0.05) < 0.01


def test_the_default_is_the_standard_library():
    a, b = corpus(), corpus()
    assert a.sha256 == b.sha256
    assert len(a.train) > 5e6
    everything = bytes(a.train) + bytes(a.validation)
    assert b"def namedtuple(" in everything
    assert b"class TestCase_" not in everything
    assert b"import test.support" not in everything[:1000]
    assert all("test" not in folder for folder in sources._NOT_SOURCE - {"test", "tests", "idle_test"})


def test_a_tokenizer(text, tokenizer):
    c = corpus([text], tokenizer)
    assert c.vocab_size == 300
    assert len(c.train) < len(TEXT.encode()) / 2
    assert c.decode(c.encode("alle 时间")) == "alle 时间"
    got = c.decode(c.train.tolist())
    want = "".join(piece.decode() for split, piece in _stretches(TEXT.encode()) if split == "train")
    assert got == want
    assert c.sha256 != corpus([text]).sha256


def test_bits_per_byte_count_bytes(text, tokenizer):
    assert corpus([text]).bits_per_byte(math.log(2)) == pytest.approx(1)
    c = corpus([text], tokenizer)
    validation = sum(len(piece) for split, piece in _stretches(TEXT.encode()) if split == "validation")
    assert c.bits_per_byte(3 * math.log(2)) == pytest.approx(3 * len(c.validation) / validation)


def test_patterns_are_sorted_and_files_keep_their_order(tmp_path):
    for name in ("b", "a", "c"):
        (tmp_path / f"{name}.txt").write_text(name * 500)
    by_pattern = corpus([str(tmp_path / "*.txt")])
    assert by_pattern.sha256 == corpus([tmp_path / f"{n}.txt" for n in "abc"]).sha256
    assert by_pattern.sha256 != corpus([tmp_path / f"{n}.txt" for n in "cba"]).sha256


def test_where_a_file_ends_matters(tmp_path):
    for name, content in {"a": "xy", "b": "z", "c": "x", "d": "yz"}.items():
        (tmp_path / name).write_text(content * 300)
    assert corpus([tmp_path / "a", tmp_path / "b"]).sha256 != corpus([tmp_path / "c", tmp_path / "d"]).sha256


def bad(kind: str, folder: Path) -> tuple[list, str | None]:
    path = folder / "bad.txt"
    if kind == "empty":
        path.write_bytes(b"")
    if kind == "undecodable":
        path.write_bytes(b"fine so far \xff\xfe")
    if kind == "tokenizer":
        path.write_text("{}")
        return [folder / "a.txt"], str(path)
    return [{"folder": folder, "pattern": folder / "*.md"}.get(kind, path)], None


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        ("missing", FileNotFoundError, "bad.txt"),
        ("empty", ValueError, "bad.txt is empty"),
        ("undecodable", ValueError, "bad.txt is not UTF-8 text: byte 12 is 0xff"),
        ("folder", IsADirectoryError, "is a folder; name text files"),
        ("pattern", FileNotFoundError, "no file matches"),
        ("tokenizer", ValueError, "bad.txt is not a tokenizer.json"),
    ],
)
def test_what_is_no_text(kind, error, message, tmp_path, text, cache):
    paths, tokenizer = bad(kind, tmp_path)
    with pytest.raises(error) as caught:
        corpus([text, *paths], tokenizer)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not cache.exists()


def test_nothing_half_written(text, cache, monkeypatch):
    import importlib

    module = importlib.import_module("linattn.data.corpus")

    def full(aside, *_):
        (aside / "train.bin").write_bytes(b"half")
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(module, "_write_splits", full)
    with pytest.raises(OSError, match="No space left on device; set XDG_CACHE_HOME"):
        corpus_function([text])
    assert list(cache.iterdir()) == []


def test_what_a_quicker_process_has_put_there_stays(text, cache, monkeypatch):
    """It may be reading them, and replacing would remove the files for a moment."""
    import importlib

    module = importlib.import_module("linattn.data.corpus")
    write, places = module._write_splits, []

    def slower(*arguments):
        monkeypatch.setattr(module, "_write_splits", write)
        c = corpus_function([text])  # the other process
        places.append((cache / c.sha256).stat().st_ino)
        return write(*arguments)

    monkeypatch.setattr(module, "_write_splits", slower)
    c = corpus_function([text])
    assert [folder.name for folder in cache.iterdir()] == [c.sha256]
    assert places == [(cache / c.sha256).stat().st_ino]


@pytest.mark.parametrize("damage", ["short", "no json", "wrong json", "gone"])
def test_a_damaged_cache_is_made_again(damage, text, cache):
    c = corpus([text])
    want, folder = np.array(c.train), cache / c.sha256
    if damage == "short":
        os.truncate(folder / "train.bin", 100)
    elif damage == "gone":
        (folder / "validation.bin").unlink()
    else:
        (folder / "corpus.json").write_text("{" if damage == "no json" else json.dumps([1]))
    assert np.array_equal(corpus([text]).train, want)


def test_tokens_are_mapped_not_read(text):
    c = corpus([text])
    assert isinstance(c.train, np.memmap)
    assert c.train.dtype == np.uint8
    assert not c.train.flags.writeable
