"""A whole run: results, files, and refusals."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from linattn.cli.main import main
from linattn.train import TrainOptions, load_run, saved_options, train
from linattn.train.progress import Recorder
from tests.train.runs import TEXT, contents, options


def test_what_a_run_gives(done):
    assert [r["step"] for r in done.history] == [3, 6]
    assert [r["tokens"] for r in done.history] == [96, 192]
    assert done.history == [json.loads(line) for line in (done.run / "metrics.jsonl").read_text().splitlines()]
    assert done.history[-1]["validation_bits_per_byte"] == done.validation_bits_per_byte < done.history[0]["validation_bits_per_byte"] < 8.2
    assert 0 < done.history[0]["seconds"] < done.history[1]["seconds"]
    assert done.tokens_per_second == pytest.approx(192 / done.history[1]["seconds"])
    model, _ = load_run(done.run)
    assert done.parameters == sum(p.numel() for p in model.parameters())


def test_what_a_run_leaves(done):
    assert sorted(p.name for p in done.run.glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
    kinds = {p.suffix for p in done.run.rglob("*") if p.is_file() and p.name != ".lock"}
    assert kinds == {".json", ".jsonl", ".md", ".py", ".safetensors"}  # nothing that unpickles; the card is README.md
    assert json.loads((done.run / "run.json").read_text())["same"]["corpus_sha256"] == done.corpus_sha256
    assert not list(done.run.glob(".*.part"))


def test_the_model_loads_both_ways(done):
    model, codec = load_run(done.run)
    ids = torch.tensor([codec.encode("the quick")])
    for folder in (done.run / "checkpoint-6", done.run):
        assert torch.equal(load_run(folder)[0](ids), model(ids))
    twin = AutoModelForCausalLM.from_pretrained(done.run / "checkpoint-6")
    torch.testing.assert_close(twin(ids).logits, model(ids))
    assert codec.decode(ids[0].tolist()) == "the quick"


def test_the_validation_loss_is_that_of_the_model(done):
    from linattn.data import corpus
    from linattn.data.packed import Windows

    data = corpus(saved_options(done.run).text)
    windows = Windows(data.validation, 16, 1 << 10)
    ids = torch.stack([windows[i]["input_ids"] for i in range(len(windows))])
    loss = torch.nn.functional.cross_entropy(load_run(done.run)[0](ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    assert done.validation_bits_per_byte == pytest.approx(loss.item() / math.log(2), rel=1e-5)


def test_the_same_seed_gives_the_same_bits_and_another_other_ones(done, text, tmp_path):
    state = torch.get_rng_state()
    again = train(options(tmp_path / "again", text), progress=False)
    assert torch.equal(torch.get_rng_state(), state)  # the caller's generator is unchanged
    assert contents(again.run / "checkpoint-6") == contents(done.run / "checkpoint-6")
    other = train(options(tmp_path / "other", text, seed=1, save_every=None), progress=False)
    assert contents(other.run / "checkpoint-6")["model.safetensors"] != contents(done.run / "checkpoint-6")["model.safetensors"]


def test_a_loss_that_is_no_number_ends_the_run(tmp_path):
    from types import SimpleNamespace

    from linattn.train.progress import Recorder

    recorder = Recorder(tmp_path / "metrics.jsonl", [], {"seconds": 0.0, "losses": []}, step_tokens=1, bits_per_byte=float)
    with pytest.raises(ValueError, match="the loss is nan at step 7: restart with a lower learning rate"):
        recorder.on_log(None, SimpleNamespace(global_step=7), None, logs={"loss": math.nan})


def test_it_learns(text, tmp_path):
    lm = train(
        options(tmp_path / "run", text, steps=60, context=32, batch_size=4, save_every=None, eval_every=60, learning_rate=1e-2),
        progress=False,
    )
    assert lm.validation_bits_per_byte < 2.5  # eight bits at the start


def test_folders_with_something_else_are_refused(text, tmp_path):
    (tmp_path / "mine.txt").write_text("precious")
    for out in (tmp_path, tmp_path / "mine.txt"):
        with pytest.raises(ValueError, match="already exists and is not a run"):
            train(options(out, text), progress=False)
    assert [p.name for p in tmp_path.iterdir()] == ["mine.txt"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"context": 4096}, "too short for a context of 4096: 3420 training tokens and 180 validation tokens"),
        ({"mixer": "gla*"}, "mixer must be names"),
        ({"mixer": "nothing"}, "no mixer is called 'nothing'"),
        ({"dim": 33}, "must be a positive multiple of its heads, but came as 33"),
        ({"text": ("missing.txt",)}, "missing.txt"),
        ({"tokenizer": "missing.json"}, "missing.json"),
    ],
)
def test_nothing_is_written_before_all_is_well(change, message, text, tmp_path):
    with pytest.raises((ValueError, OSError), match=message):
        train(
            options(tmp_path / "run", text, **change) if "text" not in change else replace(options(tmp_path / "run", text), **change),
            progress=False,
        )
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "wrong",
    [
        {"steps": 0},
        {"context": 1},
        {"save_every": 0},
        {"seed": -1},
        {"learning_rate": 0.0},
        {"learning_rate": float("inf")},
        {"batch_size": 1.5},
    ],
)
def test_options_out_of_range(wrong):
    name = next(iter(wrong))
    with pytest.raises(ValueError, match=rf"^{name} must be .* but came as"):
        TrainOptions(**wrong)


def test_a_tokenizer_goes_with_the_run(text, tmp_path):
    from tokenizers import ByteLevelBPETokenizer

    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator([TEXT], vocab_size=280, show_progress=False)
    bpe.save(str(tmp_path / "tokenizer.json"))
    result = train(options(tmp_path / "run", text, tokenizer=str(tmp_path / "tokenizer.json"), context=4, steps=2), progress=False)
    (tmp_path / "tokenizer.json").unlink()
    shutil.move(result.run / "checkpoint-2", tmp_path / "elsewhere")
    model, codec = load_run(tmp_path / "elsewhere")
    assert codec.decode(codec.encode("the lazy dog")) == "the lazy dog"
    assert model.lm_head.out_features == codec.vocab_size == 280
    (tmp_path / "elsewhere" / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"has 280 tokens, but no tokenizer\.json"):
        load_run(tmp_path / "elsewhere")


def test_the_command(text, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = f"train --mixer gla --text {text.parent}/*.txt --steps 4 --dim 32 --layers 1 --context 16 --batch-size 2 --seed 5".split()
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "runs/gla: " in out
    assert "linattn generate runs/gla" in out
    begun = saved_options(Path("runs/gla"))
    assert (begun.seed, begun.steps, begun.dim) == (5, 4, 32)
    assert main(words) == 2
    assert "already holds a run" in capsys.readouterr().err
    assert main(["train", "--resume", "--seed", "6"]) == 2
    assert "seed 5 there, 6 here" in capsys.readouterr().err
    assert main(["train", "--resume"]) == 0  # the run's own options, text included
    assert "runs/gla: " in capsys.readouterr().out
    assert main([*words, "--resume", "--out", "new"]) == 0
    captured = capsys.readouterr()
    assert "new holds no run yet: starting from the beginning" in captured.err
    assert contents(Path("new/checkpoint-4")) == contents(Path("runs/gla/checkpoint-4"))


def test_experts(tmp_path, text):
    """Validations record the share of dropped tokens since the last one, equally in a resumed run."""
    asked = {"ffn": "swiglu, switch", "ffn_options": {"switch": {"count": 4, "capacity": 0.5}}}
    whole = train(options(tmp_path / "whole", text, **asked), progress=False)
    assert load_run(whole.run)[0].config.ffn_names == ["swiglu", "switch"]
    assert all(0.4 < r["dropped"] < 1 for r in whole.history), "half of a row's tokens find room at most"
    assert "dropped" not in train(options(tmp_path / "plain", text, steps=3), progress=False).history[0]
    cut = options(tmp_path / "cut", text, **asked)
    with pytest.raises(KeyboardInterrupt), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Recorder, "on_evaluate", interrupted)
        train(cut, progress=False)
    again = train(replace(cut, resume=True), progress=False)
    assert [r["dropped"] for r in again.history] == [r["dropped"] for r in whole.history]
    assert contents(again.run / "checkpoint-6") == contents(whole.run / "checkpoint-6")


def interrupted(*_, **__):
    raise KeyboardInterrupt
