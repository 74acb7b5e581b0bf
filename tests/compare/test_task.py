"""A comparison on a task: with one made up here, and with the digits."""

import json
import math
from importlib import import_module
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from linattn.cli.main import main
from linattn.compare import task as comparison
from linattn.compare import tasks
from linattn.compare.tasks import ALL, Recipe, TaskOptions
from linattn.experiment.study import Column
from linattn.models import ImageModel
from tests.compare.test_text_page import Checker


class Sum(nn.Module):
    """Two layers; ``ffn_dim`` is the width between them."""

    def __init__(self, first: int, ffn_dim: int) -> None:
        super().__init__()
        self.first, self.norm, self.last = (
            nn.Linear(3, first),
            nn.LayerNorm(first),
            nn.Sequential(nn.Linear(first, ffn_dim), nn.Linear(ffn_dim, 1)),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x)))[..., 0]

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        (folder / "weights.json").write_text(json.dumps([p.tolist() for p in self.parameters()]))


class Adding:
    """The sum of three numbers."""

    title = "Adding <three> numbers"
    question = "Is the sum right?"
    full = Recipe(mixers=("softmax", "gla"), steps=25, dim=8, layers=1, batch_size=16, learning_rate=1e-2)
    quick = Recipe(mixers=("softmax",), steps=2, dim=8, layers=1, batch_size=4, learning_rate=1e-2, seeds=1)
    figures = (
        Column("error", "mean error", "{:.3f}".format, spread=True, lower_is_better=True),
        Column("bytes", "bytes", "{:.0f}".format, spread=True),
    )
    factor = 1.0

    def facts(self):
        return {"name": "numbers & sums", "sha256": "00", "train": 10_000}

    def mixers(self):
        return ["gla", "softmax"]

    def model(self, mixer, recipe, ffn_dim):
        return Sum(recipe.dim * (2 if mixer == "gla" else 1), 64 if ffn_dim is None else ffn_dim)

    def batches(self, recipe, seed):
        generator = torch.Generator().manual_seed(seed)
        while True:
            yield torch.randn(recipe.batch_size, 3, generator=generator)

    def loss(self, model, x):
        assert model.training and not torch.is_inference_mode_enabled()
        return self.factor * F.mse_loss(model(x), x.sum(-1))

    def evaluate(self, model):
        assert not model.training
        x = torch.randn(200, 3, generator=torch.Generator().manual_seed(9))
        return {"error": (model(x) - x.sum(-1)).abs().mean().item()}

    def measure(self, model):
        return {"bytes": float(sum(p.nbytes for p in model.parameters()))}


@pytest.fixture
def adding(monkeypatch):
    """The made-up task in place of the others."""
    monkeypatch.setattr(comparison, "load", lambda name: task)
    task = Adding()
    return task


def test_a_comparison(adding, tmp_path):
    before = torch.random.get_rng_state()
    report = comparison.compare(TaskOptions("adding", out=tmp_path / "a"))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert report == json.loads((tmp_path / "a" / "report.json").read_text())
    assert report["complete"] and report["task"] == "adding" and [m["name"] for m in report["mixers"]] == ["softmax", "gla"]
    sizes = [m["parameters"] for m in report["mixers"]]
    assert max(sizes) <= 1.02 * min(sizes)
    for m in report["mixers"]:
        errors = [run["figures"]["error"] for run in m["runs"]]
        assert [run["seed"] for run in m["runs"]] == [0, 1, 2] and len(set(errors)) == 3
        assert m["error"] == pytest.approx(sum(errors) / 3)
        assert m["error_spread"] == pytest.approx(torch.tensor(errors, dtype=torch.float64).std().item())
        assert m["bytes"] == 4 * m["parameters"] and m["bytes_spread"] == 0
        for run in m["runs"]:
            steps = [h["step"] for h in run["history"]]
            assert steps == [3, 6, 9, 12, 15, 18, 21, 24, 25] and run["history"][-1]["error"] == run["figures"]["error"]
            assert run["history"][-1]["loss"] < 0.7 * run["history"][0]["loss"], "it learns"
            assert (tmp_path / "a" / run["model"] / "weights.json").is_file()
    page = (tmp_path / "a" / "report.html").read_text()
    checker = Checker()
    checker.feed(page)
    assert checker.open == [] and len(checker.ids) == len(set(checker.ids))
    assert "Adding &lt;three&gt; numbers" in page and "<three>" not in page.partition("<script")[0]
    assert page.count("<svg class=") == 4 and "10,000 train" in page and "3 seeds" in page


@pytest.mark.parametrize("name", ["digits", "recommend"])
def test_all_mixers_of_a_task_can_be_compared(name):
    task = tasks.load(name)
    recipe = comparison._recipe(task, TaskOptions(name, mixers=ALL, quick=True))
    assert sorted(recipe.mixers) == task.mixers()
    assert list(comparison._sizes(task, recipe)) == list(recipe.mixers), "all of one size"


def test_all_are_named_in_the_report(adding, tmp_path):
    report = comparison.compare(TaskOptions("adding", mixers=ALL, steps=2, seeds=1, out=tmp_path))
    assert report["options"]["mixers"] == ["gla", "softmax"] and "--mixers all --steps 2" in report["command"]


def test_the_same_command_gives_the_same_models(adding, tmp_path):
    for name in "ab":
        comparison.compare(TaskOptions("adding", out=tmp_path / name, quick=True))
    weights = [(tmp_path / name / "models/softmax/seed-0/weights.json").read_text() for name in "ab"]
    assert weights[0] == weights[1]


def test_one_seed_has_no_spread_and_seeds_follow_the_first(adding, tmp_path):
    report = comparison.compare(TaskOptions("adding", mixers=("gla",), steps=2, seeds=1, seed=7, out=tmp_path))
    (mixer,) = report["mixers"]
    assert mixer["error_spread"] is None and [run["seed"] for run in mixer["runs"]] == [7]
    assert report["command"] == f"linattn compare --task adding --mixers gla --steps 2 --seeds 1 --seed 7 --out {tmp_path}"


def test_an_earlier_report_is_replaced_and_other_files_are_not_touched(adding, tmp_path):
    for mixer in ("gla", "softmax"):
        comparison.compare(TaskOptions("adding", mixers=(mixer,), steps=2, seeds=1, out=tmp_path / "a"))
    assert [p.name for p in (tmp_path / "a" / "models").iterdir()] == ["softmax"]
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "mine.txt").write_text("")
    with pytest.raises(ValueError, match="holds files that are not part of a linattn report"):
        comparison.compare(TaskOptions("adding", out=tmp_path / "b"))


def test_a_training_that_diverges_is_named(adding, tmp_path):
    adding.factor = math.nan
    with pytest.raises(ValueError, match="the training of softmax with seed 0 diverged: its loss is nan"):
        comparison.compare(TaskOptions("adding", out=tmp_path))
    assert not json.loads((tmp_path / "report.json").read_text())["complete"]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"mixers": ()}, "at least one mixer"),
        ({"mixers": ("gla", "gla")}, "gla came more than once"),
        ({"seeds": 0}, "seeds must be at least 1"),
        ({"steps": -1}, "steps must be at least 1"),
        ({"seed": -1}, "seed must be from 0"),
    ],
)
def test_options_without_a_meaning_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        TaskOptions("digits", **wrong)


def test_every_task_is_there():
    with pytest.raises(ValueError, match="task must be one of text, digits.*but came as 'digit'"):
        tasks.load("digit")
    for name in tasks.TASKS:
        task = tasks.load(name)
        assert task.full.mixers and set(task.full.mixers) <= set(task.mixers()) and task.quick.steps < task.full.steps


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--task", "digits", "--contexts", "8"], "--contexts cannot be used with --task digits"),
        (["--task", "digits", "--text", "a.txt", "--contexts", "8"], "--text and --contexts cannot be used with --task digits"),
        (["--task", "digit"], "task must be one of text, digits"),
        (["--task", "digits", "--mixers", "gla"], "'gla' is causal"),
        (["--task", "digits", "--mixers", "focused,focused"], "focused came more than once"),
    ],
)
def test_the_command_line_refuses(words, message, capsys, tmp_path):
    assert main(["compare", *words, "--out", str(tmp_path / "new")]) != 0
    error = capsys.readouterr().err
    assert error.startswith("linattn: ") and error.count("\n") == 1 and message in error
    assert not (tmp_path / "new").exists()


def test_the_table_of_the_command_line(monkeypatch, adding, capsys, tmp_path):
    monkeypatch.setattr(import_module("linattn.cli.compare"), "load", lambda name: adding)
    assert main(["compare", "--task", "digits", "--quick", "--out", str(tmp_path)]) == 0
    head, row, last = capsys.readouterr().out.splitlines()
    assert head.split("\t") == ["mixer", "parameters", "error", "error_spread", "bytes", "bytes_spread", "seconds"]
    assert row.split("\t")[0] == "softmax" and row.split("\t")[3] == "-" and last == f"report: {tmp_path / 'report.html'}"


def test_digits(tmp_path, capsys):
    pytest.importorskip("sklearn")
    words = ["--mixers", "slab,performer", "--steps", "30", "--dim", "32", "--layers", "1", "--seeds", "1", "--out", str(tmp_path)]
    assert main(["compare", "--task", "digits", *words]) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["data"]["train"] == 1437 and report["data"]["test"] == 360
    for m in report["mixers"]:
        history = m["runs"][0]["history"]
        assert history[-1]["loss"] < history[0]["loss"] and m["accuracy"] > 0.12 and m["images_per_second"] > 0
        model = ImageModel.load(tmp_path / m["runs"][0]["model"])
        with torch.inference_mode():
            assert tasks.load("digits").evaluate(model) == {"accuracy": m["accuracy"]}


def test_one_seed_has_no_spread():
    figure = Column("bits", "bits per character", "{:.2f}".format, spread=True)
    assert figure.cell({"bits": 5.007, "bits_spread": None}) == "5.01"
    assert figure.cell({"bits": 5.007, "bits_spread": 0.1}) == "5.01 ± 0.10"
