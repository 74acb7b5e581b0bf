"""The recommendation task: figures by definition, bounds, held-out items, and CSV files."""

import json
import math

import pytest
import torch

from linattn.cli.main import main
from linattn.compare.recommend import TASK, RecommendTask, Split, figures_of, next_item_loss, rank, ranks
from linattn.compare.tasks import Recipe
from linattn.data.interactions import Chain, Interactions, markov_interactions
from linattn.models import RecommendConfig, RecommendModel

TINY = Recipe(mixers=("linrec",), steps=1, dim=32, layers=1, batch_size=4, learning_rate=1e-2)


def log(*histories):
    return Interactions([torch.tensor(h) for h in histories], [str(i) for i in range(20)], "00")


def test_ranks_by_hand():
    scores = torch.tensor([[3.0, 1.0, 2.0], [1.0, 1.0, 1.0], [math.nan, 0.0, 0.0]])
    assert [rank(scores, torch.full((3,), i)).tolist() for i in range(3)] == [[1, 3, 3], [3, 3, 3], [2, 3, 3]]


def test_figures_by_hand():
    told = figures_of(torch.tensor([1, 2, 10, 11, 400]))
    assert told["hr"] == pytest.approx(3 / 5)
    assert told["ndcg"] == pytest.approx((1 + 1 / math.log2(3) + 1 / math.log2(11)) / 5)


def test_figures_agree_with_scikit_learn():
    metrics = pytest.importorskip("sklearn.metrics")

    scores, wanted = torch.randn(50, 30), torch.randint(30, (50,))
    told, truth = figures_of(rank(scores, wanted)), torch.nn.functional.one_hot(wanted, 30)
    assert told["ndcg"] == pytest.approx(metrics.ndcg_score(truth.numpy(), scores.numpy(), k=10))
    assert told["hr"] == pytest.approx(metrics.top_k_accuracy_score(wanted.numpy(), scores.numpy(), k=10, labels=range(30)))


def test_the_last_two_items_are_never_learned_from():
    split = Split(log([0, 1, 2, 3], [4, 5, 6], [7, 8], [9]))
    assert [h.tolist() for h in split.asked] == [[0, 1, 2], [4, 5]] and split.wanted.tolist() == [3, 6]
    assert [h.tolist() for h in split.learned] == [[0, 1], [7, 8]], "who is not tested is learned from whole"
    with pytest.raises(ValueError, match="users with at least 3 interactions.*the longest of its 2 histories has 2"):
        Split(log([0, 1], [2, 3]))


def test_the_best_that_is_possible():
    """Ranking by the chain's probabilities reaches it, up to the noise of 4,000 draws, and no other ranking exceeds it."""
    made, chain = markov_interactions()
    split = Split(made, chain)
    best = split.references()["best that is possible"]
    pairs = torch.stack([h[-2:] for h in split.asked])
    found = figures_of(rank(chain.chances(pairs), split.wanted))
    for key in ("hr", "ndcg"):
        assert found[key] == pytest.approx(best[key], abs=0.02)
        first_order = figures_of(rank(chain.last[pairs[:, -1]], split.wanted))
        assert split.references()["by popularity"][key] < first_order[key] < best[key] - 0.05


def test_the_best_by_hand():
    same = torch.tensor([[0.75, 0.25], [0.5, 0.5]], dtype=torch.float64)
    chain = Chain(same, same, torch.tensor([0.5, 0.5], dtype=torch.float64), (0.5, 0.5, 0.0))
    split = Split(Interactions([torch.tensor([0, 0, 0, 0, 1])], ["a", "b"], "00"), chain)
    assert split.references()["best that is possible"] == pytest.approx({"hr": 1.0, "ndcg": 0.75 + 0.25 / math.log2(3)})


@pytest.mark.parametrize("causal", [True, False])
def test_the_loss(causal):
    """Of causal models at every place; of others after a part of each history, without the item to predict."""
    model = RecommendModel(RecommendConfig(items=20, length=8, dim=32, layers=1, causal=causal)).double()
    batch = [torch.tensor([3, 1, 4, 1]), torch.tensor([5, 9])]
    torch.manual_seed(0)
    loss = next_item_loss(model, batch)
    if causal:
        said = [model(h[None, :-1])[0].log_softmax(-1).gather(1, h[1:, None]) for h in batch]
        assert loss.item() == pytest.approx(-torch.cat(said).mean().item())
    else:
        values = [-model(h[None, :n])[0, -1].log_softmax(-1)[h[n]].item() for h in batch for n in range(1, len(h))]
        assert any(loss.item() == pytest.approx((v + values[-1]) / 2) for v in values[:-1])


def test_ranks_of_a_model_are_of_all_items():
    model = RecommendModel(RecommendConfig(items=20, length=8, dim=32, layers=1)).eval()
    got = ranks(model, [torch.tensor([3, 1, 4]), torch.tensor([5])], torch.tensor([1, 5]))
    order = [model(torch.tensor([h]))[0, -1].argsort(descending=True).tolist() for h in ([3, 1, 4], [5])]
    assert got.tolist() == [order[0].index(1) + 1, order[1].index(5) + 1], "those taken before are ranked, too"


def test_batches_are_the_same_for_the_same_seed():
    first, again, other = (next(TASK.batches(TINY, seed)) for seed in (0, 0, 1))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(len(a) == len(b) and torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_histories_longer_than_a_model_looks_at(tmp_path):
    rows = [f"u{u},{(7 * u + t) % 13},{t}" for u in range(5) for t in range(60 + u)]
    (tmp_path / "log.csv").write_text("\n".join(rows))
    task = RecommendTask().on(tmp_path / "log.csv")
    model = task.model("linrec", TINY, None)
    lengths = {len(h) for h in next(task.batches(TINY, 0))}
    assert lengths == {51} and task.loss(model, next(task.batches(TINY, 0))).isfinite() and task.evaluate(model.eval())["hr"] <= 1


def test_the_command_on_a_csv_with_bad_rows(tmp_path, capsys):
    rows = [f"u{u},i{(u + 3 * t) % 11},{t}" for u in range(20) for t in range(8)]
    rows[4:4] = ["u1,i1", "oops", "u2,i3,yesterday"]
    (tmp_path / "log.csv").write_text("user,item,time\n" + "\n".join(rows))
    words = f"compare --task recommend --data {tmp_path / 'log.csv'} --mixers linrec,softmax --quick --steps 2 --out {tmp_path / 'out'}"
    assert main(words.split()) == 0
    out, err = capsys.readouterr()
    head, *lines = [line.split("\t") for line in out.splitlines()]
    assert head[:4] == ["mixer", "parameters", "hr", "hr_spread"] and [line[0] for line in lines[:2]] == ["linrec", "softmax"]
    assert "3 lines were left out (line 6, 7, 8): a line is user,item,time" in err
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["data"]["rows left out"] == 3 and report["data"]["users"] == 20 and report["command"].count("--data") == 1
    page = (tmp_path / "out" / "report.html").read_text()
    assert "by popularity" in page and "line 6, 7, 8" in page
    model = RecommendModel.load(tmp_path / "out" / report["mixers"][0]["runs"][0]["model"])
    assert model.recommend([torch.tensor([0, 1])], 3).shape == (1, 3)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--task digits --data x.csv", "--data cannot be used with --task digits, which has its own"),
        ("--data x.csv", "--data cannot be used with --task text"),
        ("--task recommend --data nowhere.csv", "No such file or directory: nowhere.csv"),
        ("--task recommend --mixers focused", "'focused' is of the kind grid"),
    ],
)
def test_refusals(words, message, capsys, tmp_path):
    assert main(["compare", *words.split(), "--out", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err
