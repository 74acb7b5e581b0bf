"""The sequence-to-sequence tasks: data, accuracy, and learning."""

import json

import pytest
import torch

from linattn.cli.main import main
from linattn.compare import sequences, tasks
from linattn.compare.sequences import BETWEEN, BEYOND, LEARNED, SORT, TASK, roles, target_loss
from linattn.compare.tasks import Recipe
from linattn.models import Seq2SeqModel

TINY = Recipe(mixers=("softmax",), steps=1, dim=32, layers=1, batch_size=4, learning_rate=1e-2)


def test_targets():
    for task, write in ((TASK, lambda row: row[::-1]), (SORT, sorted)):
        pairs = [pair for several in task.asked.values() for pair in several] + [next(task.batches(TINY, 0))]
        for source, target in pairs:
            assert [row.tolist() for row in target] == [[*write(row.tolist()), 0] for row in source]
            assert source.min() >= 1


def test_lengths_that_are_asked_for_are_not_learned_from():
    batches = TASK.batches(TINY, 0)
    seen = {next(batches)[0].shape[1] for _ in range(200)}
    assert seen == set(LEARNED) and not seen & {*BETWEEN, *BEYOND}
    assert {key: tuple(source.shape[1] for source, _ in pairs) for key, pairs in TASK.asked.items()} == {
        "between": BETWEEN,
        "beyond": BEYOND,
    }
    assert min(LEARNED) < min(BETWEEN) and max(BETWEEN) < max(LEARNED) < min(BEYOND)


def test_only_a_target_without_a_mistake_is_right():
    class Oracle:
        def decode(self, source):
            rows = [*source.flip(1)]
            rows[0] = rows[0][:-1]
            rows[1] = torch.cat([rows[1], rows[1][:1]])
            rows[2] = torch.cat([rows[2][:1] % 12 + 1, rows[2][1:]])
            return rows

    assert sequences._right(Oracle(), TASK.asked["between"]) == 1 - 3 / 128


def test_the_loss_is_of_each_token_given_those_before():
    model = TASK.model("softmax", TINY, None).eval()
    source, target = torch.tensor([[1, 2, 3], [4, 5, 6]]), torch.tensor([[3, 2, 1, 0], [6, 5, 0, 0]])
    real = torch.tensor([[True] * 4, [True] * 3 + [False]])
    loss, terms = target_loss(model, source, None, target, real), []
    for row, n in ((0, 4), (1, 3)):
        for t in range(n):
            said = model(source[row][None], torch.tensor([[0, *target[row, :t].tolist()]]))[0, -1]
            terms.append(-said.log_softmax(-1)[target[row, t]].item())
    assert loss.item() == pytest.approx(sum(terms) / len(terms), rel=1e-5)


def test_roles():
    assert roles("cosformer") == {"encoder": "cosformer", "decoder": "cosformer", "cross": "cross_cosformer"}
    assert roles("gla")["cross"] == "cross_softmax"
    assert {"gla", "softmax", "linrec"} <= set(TASK.mixers()) and "clustered" not in TASK.mixers()


@pytest.mark.parametrize("name", ["reverse", "sort"])
def test_the_command(name, tmp_path, capsys):
    words = f"compare --task {name} --quick --steps 3 --mixers softmax,cosformer --out {tmp_path / 'out'}"
    assert main(words.split()) == 0
    head, *lines = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert head[2:4] == ["between", "between_spread"] and [line[0] for line in lines[:2]] == ["softmax", "cosformer"]
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    model = Seq2SeqModel.load(tmp_path / "out" / report["mixers"][1]["runs"][0]["model"])
    assert model.config.names("cross") == ["cross_cosformer"] and report["mixers"][0]["tokens_per_second"] > 0
    assert tasks.load(name).evaluate(model) == {key: report["mixers"][1][key] for key in ("between", "beyond")}
