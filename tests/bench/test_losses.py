"""The texts and the trainings of six models: samples, choices and records."""

import argparse
import json

import pytest

from benchmarks import losses, plots, tables, texts
from linattn.data import prepare

MODELS = ("softmax", "hybrid")


@pytest.fixture
def folder(tmp_path):
    """Texts, and tokens made of them."""
    for name, text in (("prose", "The cat sat on the mat. "), ("code", "def f(x): return x\u2028\n")):
        lines = [json.dumps({"text": text * (i + 1)}, ensure_ascii=False) + "\n" for i in range(40)]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    (tmp_path / "sources.json").write_text("[]")
    assert texts.main([str(tmp_path), "--megabytes", "1", "--vocabulary", "300"]) == 0
    prepare([tmp_path / "sample.jsonl"], tmp_path / "tokens", tokenizer=tmp_path / "tokenizer.json", end=texts.END, validation=0.2)
    return tmp_path


@pytest.fixture
def asked(folder):
    given = ["--data", str(folder / "tokens"), "--work", str(folder / "runs"), "--models", ",".join(MODELS), "--dims", "64,128"]
    (folder / "runs").mkdir()
    return losses.options(
        argparse.ArgumentParser(), [*given, "--rates", "0.001,0.002,0.004", "--layers", "4", "--steps", "40", "--sweep-steps", "2"]
    )


def row(training, loss, **more):
    history = [
        {"step": s, "tokens": 100 * s, "validation_bits_per_byte": loss + 1 / s, "seconds": s} for s in range(2, training.steps + 1, 2)
    ]
    return {
        "name": training.name,
        **vars(training),
        "history": history,
        "parameters": 1000 * training.dim,
        "tokens_per_second": 50.0,
        **more,
    }


def test_the_sample_is_of_whole_documents_in_an_order_of_the_seed(folder):
    before = (folder / "sample.jsonl").read_text(encoding="utf-8").split("\n")
    assert len(before) == 81 and sorted(before[:-1]) != before[:-1]
    texts.sample(folder, 2000, 0)
    some = (folder / "sample.jsonl").read_text(encoding="utf-8").split("\n")
    assert some[:-1] == before[: len(some) - 1] and 2000 <= sum(len(json.loads(line)["text"]) for line in some[:-1]) < 4000
    texts.sample(folder, 2000, 1)
    assert (folder / "sample.jsonl").read_text(encoding="utf-8").split("\n") != some


def test_long_trainings_start_at_the_best_rate_of_the_short_ones(asked, tmp_path):
    mine = losses.Losses(asked, tmp_path / "losses.json", {}, None)
    assert mine.long() == [] and mine.best("softmax") is None
    rows = [row(t, 3.0 + abs(t.learning_rate - 0.002)) for t in mine.swept("softmax")]
    rows += [
        {"name": t.name, "failure": "no memory"} if t.learning_rate > 0.002 else row(t, 3.0 - t.learning_rate, tokens_per_second=20.0)
        for t in mine.swept("hybrid")
    ]
    mine.path.write_text(json.dumps({"rows": rows}))
    found = [(t.model, t.dim, t.learning_rate) for t in mine.long()]
    assert found == [("hybrid", 128, 0.001), ("softmax", 128, 0.001), ("hybrid", 64, 0.002), ("softmax", 64, 0.002)]
    widths = [mine.width(model, 64) for model in MODELS]
    counts = [sum(p.numel() for p in losses.LanguageModel(mine.config(m, 64, w)).parameters()) for m, w in zip(MODELS, widths, strict=True)]
    assert all(w % losses.MULTIPLE == 0 for w in widths) and max(counts) < 1.2 * min(counts)


@pytest.mark.parametrize(
    ("wanted", "tried"), [(0.0005, [0.00025, 0.0005, 0.001, 0.002, 0.004]), (0.008, [0.001, 0.002, 0.004, 0.008, 0.016])]
)
def test_the_best_rate_is_never_the_last_one_tried(asked, tmp_path, wanted, tried):
    mine = losses.Losses(asked, tmp_path / "losses.json", {}, None)
    rows = {}
    while mine.best("softmax") is None:
        rows |= {t.name: row(t, 3.0 + abs(t.learning_rate - wanted)) for t in mine.swept("softmax")}
        mine.path.write_text(json.dumps({"rows": list(rows.values())}))
    assert mine.best("softmax") == wanted
    assert [t.learning_rate for t in mine.swept("softmax")] == tried


def test_rates_end_where_every_training_fails(asked, tmp_path):
    mine = losses.Losses(asked, tmp_path / "losses.json", {}, None)
    mine.path.write_text(json.dumps({"rows": [{"name": t.name, "failure": "no memory"} for t in mine.swept("softmax")]}))
    assert [t.learning_rate for t in mine.swept("softmax")] == [0.001, 0.002, 0.004]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_training_takes_the_gpu_by_itself(asked, tmp_path, device):
    asked.device, seen = device, []
    training = losses.Training("softmax", 64, 0.001, 2)
    (asked.work / f"{training.name}.log").write_text("no memory\n")

    def start(target, args):
        seen.extend(args[0])
        return argparse.Namespace(start=lambda: None, join=lambda seconds=None: None, is_alive=lambda: False, exitcode=1)

    made = losses.Losses(asked, tmp_path / "losses.json", {"card": "a card"}, start).trained(training)
    assert made["failure"] == "no memory" and made["card"] == "a card"
    assert [a for a in seen if a.startswith("--device")] == (["--device=cpu"] if device == "cpu" else [])
    assert "--warmup=60" in seen


def test_a_training_belongs_to_one_program(asked, tmp_path):
    with losses.claimed(asked.work / "x.lock") as one, losses.claimed(asked.work / "x.lock") as other:
        assert one and not other


def test_the_command_has_no_places_of_this_machine(asked):
    given = ["--data", "/here/tokens", "--steps", "40", "--work", "/there", "--seconds", "9", "--sweep-only"]
    assert losses.command(given) == "python -m benchmarks.losses --data tokens --work runs --steps 40"
    assert losses.about(asked, {"card": "a card"}, given)["data"]["vocabulary"] <= 300


def test_table_and_drawing(asked, tmp_path):
    mine = losses.Losses(asked, tmp_path / "losses.json", {}, None)
    trainings = [losses.Training(m, dim, 0.004 * 64 / dim, 40) for dim in (64, 128) for m in MODELS]
    rows = [row(t, 2.0 - 0.1 * (t.model == "hybrid") - t.dim / 1000) for t in trainings[:-1]]
    body = losses.about(asked, {"card": "a card", "torch": "2.0"}, []) | {
        "rows": [*rows, {**row(trainings[-1], 1.0), "failure": "no memory"}]
    }
    text = tables.losses(body, tables.TITLES["en"])
    assert "| softmax | 0.004 | 1.961 · 1.897 | 0k · 0k |" in text and "| hybrid | 0.004 | 1.861 · – |" in text
    assert "From the lowest loss on, 0M: hybrid, softmax. From the lowest loss on, 0M: softmax." in text
    early = body | {"rows": [r for r in body["rows"] if (r["model"], r["dim"]) != ("hybrid", 64)]}
    assert "not there yet" in tables.losses(early, tables.TITLES["en"]) and not plots.first_width_done(early)
    drawn = plots.losses(body)
    assert drawn.count("<polyline") == 2 + 2 + 1 + 1 + 2 and "hybrid: gated_deltanet*3, softmax" in drawn
    assert mine.path.parent == tmp_path
