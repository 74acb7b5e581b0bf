"""The translation task: training and test data, the figure by definition, and the command on a file of pairs."""

import json

import pytest
import torch

from linattn.cli.main import main
from linattn.compare.tasks import Recipe
from linattn.compare.translate import LONGEST, TASK, Split
from linattn.data.pairs import Pairs
from linattn.models import Seq2SeqModel

TINY = Recipe(mixers=("softmax",), steps=1, dim=32, layers=1, batch_size=4, learning_rate=1e-2)
LINES = [f"{'ab'[i % 2] * (1 + i % 5)}{i}\t{'甲乙'[i % 2] * (1 + i % 5)}{i}" for i in range(60)]


@pytest.fixture
def task(tmp_path):
    (tmp_path / "pairs.tsv").write_text("\n".join([*LINES, "no pair"]), encoding="utf-8")
    return TASK.on(tmp_path / "pairs.tsv")


def test_what_is_asked_is_not_learned_from(task):
    assert len(task.data.test) == 3 and len(task.data.train) == 57
    assert not set(task.data.test) & set(task.data.train)
    assert next(task.batches(TINY, 0)) == next(task.batches(TINY, 0)) != next(task.batches(TINY, 1))
    assert task.data.ratio == pytest.approx(1.0)


def test_characters_and_lengths():
    split = Split(Pairs([("ab", "甲"), ("b", "乙甲"), ("c" * (LONGEST + 1), "丙")], "00"))
    assert len(split.train) == 1 and len(split.test) == 1
    source, mask, target, real = split.tensors([("ab", "甲"), ("?", "乙甲丁")])
    assert source.shape == (2, 2) and mask.tolist() == [[True, True], [True, False]] and real.sum(1).tolist() == [2, 4]
    assert source[1, 0] == 1 and target[1, 2] == 1, "unknown characters are one"
    assert (target[torch.arange(2), real.sum(1) - 1] == 0).all(), "the end is asked for"
    with pytest.raises(ValueError, match="at least 2 pairs of at most .* are needed, but 0 of 1 are"):
        Split(Pairs([("c" * (LONGEST + 1), "丙")], "00"))


def test_bits_per_character(task):
    model = task.model("softmax", TINY, None).eval()
    bits, count = 0.0, 0
    for pair in task.data.test:
        source, _, target, _ = task.data.tensors([pair])
        begun = torch.cat([torch.zeros(1, 1, dtype=torch.int64), target[:, :-1]], 1)
        said = model(source, begun)[0].log_softmax(-1).gather(1, target.mT)
        bits, count = bits - said.sum().item(), count + len(said)
    assert task.evaluate(model)["bits"] == pytest.approx(bits / count / 0.6931472, rel=1e-4)


def test_the_command(tmp_path, task, capsys):
    words = f"compare --task translate --data {task.path} --quick --steps 3 --mixers cosformer --out {tmp_path / 'out'}"
    assert main(words.split()) == 0
    assert "1 line was left out (line 61)" in capsys.readouterr().err
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    model = Seq2SeqModel.load(tmp_path / "out" / report["mixers"][0]["runs"][0]["model"])
    source, mask, *_ = task.data.tensors(task.data.test)
    assert all(isinstance(task.data.text(row), str) for row in model.decode(source, mask))


def test_without_a_handbook_it_says_how_to_get_one(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(
        "linattn.compare.translate.handbook", lambda: (_ for _ in ()).throw(FileNotFoundError("apt install debian-handbook"))
    )
    monkeypatch.delitem(TASK.__dict__, "data", raising=False)
    assert main(["compare", "--task", "translate", "--quick", "--out", str(tmp_path / "out")]) == 2
    assert "apt install debian-handbook" in capsys.readouterr().err
