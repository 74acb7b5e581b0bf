"""Text, JSON lines and Parquet as memory-mapped shards: content, starts of documents, and refusals."""

import json
import os

import numpy as np
import pytest
import torch

from linattn.cli.main import main
from linattn.data import PackedTokens, prepare, prepared
from linattn.data import documents as reading
from linattn.data.packed import Windows, collate
from linattn.data.shards import Shards, check
from linattn.hf import LinattnForCausalLM, LMConfig
from tests.train.runs import edited

TEXTS = [f"document {i}: " + "déjà vu, " * (i % 7) for i in range(60)]


@pytest.fixture
def lines(tmp_path):
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text, "id": i}) + "\n" for i, text in enumerate(TEXTS)))
    return path


def texts_of(shards: Shards, decode) -> list[str]:
    """The documents in ``shards``."""
    borders = [0, *shards.starts(0, len(shards)), len(shards)]
    return [decode(shards[a:b].tolist()) for a, b in zip(borders[:-1], borders[1:], strict=True)]


@pytest.mark.parametrize("shard_tokens", [1, 100, 1 << 28])
def test_all_documents_are_there_in_order(shard_tokens, lines, tmp_path):
    count = prepare([lines], tmp_path / "out", validation=0.2, shard_tokens=shard_tokens)
    data = prepared(tmp_path / "out")
    train, held = (texts_of(split, data.codec.decode) for split in (data.train, data.validation))
    assert sorted(train + held) == sorted(TEXTS) and 3 < len(held) < 25
    assert train == [text for text in TEXTS if text in train]
    assert count == {"documents": 60, "train": len(data.train), "validation": len(data.validation)}
    assert data.validation_bytes == sum(len(text.encode()) for text in held)
    assert check(tmp_path / "out") == len(data.train) + len(data.validation)
    shards = len(list((tmp_path / "out").glob("train-*.bin")))
    assert shards == {1: len(train), 1 << 28: 1}.get(shard_tokens, shards) and (shards > 5 or shard_tokens > 100)


@pytest.mark.parametrize("validation", [0.01, 0.25])
def test_the_end_of_one_small_text_is_held_out(validation, tmp_path):
    text = "".join(f"{i} wörter\n" for i in range(2000))
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    assert prepare([tmp_path / "text.txt"], tmp_path / "out", validation=validation)["documents"] == 2
    data = prepared(tmp_path / "out")
    train, held = (texts_of(split, data.codec.decode) for split in (data.train, data.validation))
    assert "".join(train + held) == text and len("".join(held)) == round(validation * len(text))


def test_the_end_of_few_documents_is_held_out(lines, tmp_path):
    prepare([lines], tmp_path / "out")
    data = prepared(tmp_path / "out")
    train, held = (texts_of(split, data.codec.decode) for split in (data.train, data.validation))
    assert "".join(train + held) == "".join(TEXTS) and len(held) == 1 and train[:59] == TEXTS[:59]


def test_slices_and_starts_across_shards():
    tokens = [np.arange(0, 5), np.arange(5, 6), np.arange(6, 12)]
    shards = Shards(tokens, [np.array([2, 5]), np.array([1]), np.array([3, 6])])
    begins = [2, 5, 6, 9]
    assert len(shards) == 12
    for start in range(12):
        for stop in range(start, 13):
            assert shards[start:stop].tolist() == list(range(start, stop))
            assert shards.starts(start, stop).tolist() == [b - start for b in begins if start < b < stop]


def test_a_tokenizer_and_an_end(lines, tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    inner = Tokenizer(models.WordLevel({"[?]": 0, "document": 1, ":": 2, "<end>": 3}, unk_token="[?]"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.save(str(tmp_path / "tokenizer.json"))
    prepare([lines], tmp_path / "out", tokenizer=tmp_path / "tokenizer.json", end="<end>", validation=0.2)
    (tmp_path / "tokenizer.json").unlink()
    data = prepared(tmp_path / "out")
    assert data.vocab_size == data.codec.vocab_size == 4
    ends = [*(data.train.starts(0, len(data.train)) - 1), len(data.train) - 1]
    assert all(data.train[e : e + 1] == 3 for e in ends) and data.train[0:1] == 1
    with pytest.raises(ValueError, match="end must be one token, but 'ab' is 2"):
        prepare([lines], tmp_path / "other", end="ab")


def test_a_text_is_cut_between_characters(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "PIECE", 5)
    (tmp_path / "a.txt").write_text("ééé図解ab")
    assert "".join(found := list(reading.documents(tmp_path / "a.txt"))) == "ééé図解ab" and len(found) > 1


def test_parquet(tmp_path):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pa.table({"body": TEXTS}), tmp_path / "a.parquet", row_group_size=7)
    assert list(reading.documents(tmp_path / "a.parquet", "body")) == TEXTS
    with pytest.raises(ValueError, match="has no column 'text', only body: choose one with --field"):
        list(reading.documents(tmp_path / "a.parquet"))
    (tmp_path / "b.parquet").write_text("no")
    with pytest.raises(ValueError, match="is damaged or not a Parquet file"):
        list(reading.documents(tmp_path / "b.parquet"))


def test_no_state_and_no_label_crosses_documents(lines, tmp_path):
    """The loss of packed windows equals that of separate documents."""
    prepare([lines], tmp_path / "out", validation=0.2)
    data = prepared(tmp_path / "out")
    rows = PackedTokens(data.train, 100, seed=1, samples=3)
    batch = collate([rows[i] for i in range(3)])
    torch.manual_seed(0)
    model = LinattnForCausalLM(LMConfig(dim=32, layers=2, mixer="gated_deltanet, softmax")).double()
    found = model(**batch).loss
    cu, flat, total, count = batch["cu_seqlens"].tolist(), batch["input_ids"].flatten(), 0.0, 0
    assert len(cu) > 4 and {100, 200} <= set(cu)
    for a, b in zip(cu[:-1], cu[1:], strict=True):
        if b - a > 1:
            total += model(flat[None, a:b], labels=flat[None, a:b]).loss.item() * (b - a - 1)
            count += b - a - 1
    assert found.item() == pytest.approx(total / count, rel=1e-6)
    assert (batch["labels"][:, 1:] != -100).sum() == count, "what the Trainer divides by"
    padded = collate([rows[i] for i in range(3)], multiple=64)
    assert len(padded["cu_seqlens"]) == 65 and set(padded["cu_seqlens"][len(cu) :].tolist()) == {300}
    assert model(**padded).loss.item() == pytest.approx(found.item(), rel=1e-9), "empty sequences change nothing"


def test_joined_documents_are_one_text(lines, tmp_path):
    prepare([lines], tmp_path / "out", validation=0.2)
    tokens = prepared(tmp_path / "out").train
    apart, joined = (PackedTokens(tokens, 100, seed=1, samples=3, isolated=flag)[2] for flag in (True, False))
    assert set(joined) == {"input_ids", "labels"} and torch.equal(joined["input_ids"], apart["input_ids"])
    assert torch.equal(joined["labels"], joined["input_ids"]) and (apart["labels"] == -100).any()
    assert set(Windows(tokens, 100, 2, isolated=False)[0]) == {"input_ids", "labels"}


def test_the_order_is_of_the_seed(lines, tmp_path):
    prepare([lines], tmp_path / "out", validation=0.2)
    tokens = prepared(tmp_path / "out").train
    one, again, other = (PackedTokens(tokens, 50, seed=s, samples=30) for s in (1, 1, 2))
    assert [one.place(i) for i in range(30)] == [again.place(i) for i in range(30)] != [other.place(i) for i in range(30)]
    assert torch.equal(one[7]["input_ids"], again[7]["input_ids"])
    assert len(Windows(tokens, 50, 4)[3]["input_ids"]) == 50


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda out: os.truncate(out / "train-00000.bin", 3), "train-00000.bin is missing or not"),
        (lambda out: (out / "train-00000.ends").unlink(), "train-00000.ends is missing or not"),
        (lambda out: edited(out / "index.json", lambda index: index.update(vocab_size=99)), "SHA-256"),
        (lambda out: (out / "index.json").write_text("{}"), "index.json is damaged, or was written by another version"),
        (lambda out: (out / "index.json").unlink(), "linattn data prepare did not write it"),
    ],
)  # fmt: skip
def test_a_damaged_folder_is_refused(change, says, lines, tmp_path):
    prepare([lines], tmp_path / "out", validation=0.2)
    change(tmp_path / "out")
    with pytest.raises((ValueError, OSError), match=says):
        prepared(tmp_path / "out")


def test_a_flipped_bit_is_found(lines, tmp_path, capsys):
    prepare([lines], tmp_path / "out", validation=0.2)
    path = tmp_path / "out" / "train-00000.bin"
    content = bytearray(path.read_bytes())
    content[7] ^= 1
    path.write_bytes(content)
    assert main(["data", "check", str(tmp_path / "out")]) == 2
    assert f"{path} is damaged" in capsys.readouterr().err


def test_what_is_refused(lines, tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"txt": "b"}\n')
    (tmp_path / "worse.jsonl").write_text("{\n")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 ")
    for inputs, how, says in [
        ([tmp_path / "bad.jsonl"], {}, "bad.jsonl, line 2, has no text under 'text'"),
        ([tmp_path / "worse.jsonl"], {}, "worse.jsonl, line 1, is not JSON"),
        ([tmp_path / "latin.txt"], {}, "latin.txt is not UTF-8 text"),
        ([tmp_path / "none.txt"], {}, "none.txt"),
        ([lines], {"validation": 0}, "validation must be a share above 0 and below 1"),
        ([lines], {"validation": 1 - 1e-9}, r"no text is left for train \(documents: 60\)"),
        ([tmp_path / "empty.txt"], {}, "inputs hold no text: .*empty.txt"),
        ([lines], {"shard_tokens": 0}, "shard_tokens must be an integer of at least 1"),
        ([tmp_path], {}, "is a folder"),
    ]:
        with pytest.raises((ValueError, OSError), match=says):
            prepare(inputs, tmp_path / "out", **how)
        assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".out*"))
    with pytest.raises(ValueError, match="already exists"):
        prepare([lines], tmp_path)
