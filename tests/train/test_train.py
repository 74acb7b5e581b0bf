"""A run from beginning to end: what it leaves, what it refuses, and going on after mishaps."""

import importlib
import json
import math
import os
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from linattn.cli.main import main
from linattn.state import only_writer
from linattn.train import Terminated, TrainOptions, checkpoint, load_run, saved_options, train
from linattn.train.progress import Recorder

TEXT = "the quick brown fox jumps over the lazy dog. " * 80


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("text") / "fox.txt"
    path.write_text(TEXT)
    return path


def options(out: Path, text: Path, **changed) -> TrainOptions:
    small = {"mixer": "gla, softmax", "steps": 6, "dim": 32, "layers": 2, "context": 16, "batch_size": 2, "save_every": 2, "eval_every": 3}
    return TrainOptions(out=out, text=(str(text),), **{**small, **changed})


@pytest.fixture(scope="module")
def done(tmp_path_factory, text):
    """A finished run, never written to."""
    out = tmp_path_factory.mktemp("runs") / "done"
    patch = pytest.MonkeyPatch()
    patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))
    yield train(options(out, text), progress=False)
    patch.undo()


def contents(folder: Path) -> dict[str, bytes]:
    """The bytes of what must not depend on how often a run was interrupted."""
    return {f.name: f.read_bytes() for f in folder.iterdir() if f.name.endswith(".safetensors")}


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
    assert kinds == {".json", ".jsonl", ".md", ".safetensors"}  # nothing that unpickles; the card is README.md
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
    assert torch.equal(torch.get_rng_state(), state)  # the caller's generator is left alone
    assert contents(again.run / "checkpoint-6") == contents(done.run / "checkpoint-6")
    other = train(options(tmp_path / "other", text, seed=1, save_every=None), progress=False)
    assert contents(other.run / "checkpoint-6")["model.safetensors"] != contents(done.run / "checkpoint-6")["model.safetensors"]


def test_a_loss_that_is_no_number_ends_the_run(tmp_path):
    from types import SimpleNamespace

    from linattn.train.progress import Recorder

    recorder = Recorder(tmp_path / "metrics.jsonl", [], {"seconds": 0.0, "losses": []}, step_tokens=1, bits_per_byte=float)
    with pytest.raises(ValueError, match="the loss is nan at step 7: start again with a lower learning rate"):
        recorder.on_log(None, SimpleNamespace(global_step=7), None, logs={"loss": math.nan})


def test_it_learns(text, tmp_path):
    lm = train(
        options(tmp_path / "run", text, steps=60, context=32, batch_size=4, save_every=None, eval_every=60, learning_rate=1e-2),
        progress=False,
    )
    assert lm.validation_bits_per_byte < 2.5  # eight bits at the start


@pytest.mark.parametrize("mishap", ["no mark", "short file", "file gone", "leftovers"])
def test_going_on_from_the_newest_whole_checkpoint(mishap, done, text, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(done.run, run)
    if mishap == "no mark":
        (run / "checkpoint-6" / checkpoint.MARK).unlink()
    elif mishap == "short file":
        os.truncate(run / "checkpoint-6" / "optimizer.safetensors", 100)
    elif mishap == "file gone":
        (run / "checkpoint-6" / "generators-0.safetensors").unlink()
    else:
        shutil.rmtree(run / "checkpoint-6")
        shutil.rmtree(run / "checkpoint-4")
        (run / ".checkpoint-4.part" / "checkpoint-4").mkdir(parents=True)
        (run / ".run.json.abc.part").write_text("half")
        with (run / "metrics.jsonl").open("a") as file:
            file.write('{"step": 9, "half')
    assert checkpoint.newest(run).name == ("checkpoint-2" if mishap == "leftovers" else "checkpoint-4")
    result = train(options(run, text, resume=True), progress=False)
    assert contents(run / "checkpoint-6") == contents(done.run / "checkpoint-6")
    assert [{**r, "seconds": 0} for r in result.history] == [{**r, "seconds": 0} for r in done.history]
    assert result.history[-1]["seconds"] > 0
    assert not list(run.glob(".*.part"))


def test_a_finished_run_is_not_trained_again(done, text, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(done.run, run)
    before = (run / "checkpoint-6" / "model.safetensors").stat().st_mtime_ns
    assert replace(train(options(run, text, resume=True), progress=False), run=done.run) == done
    assert (run / "checkpoint-6" / "model.safetensors").stat().st_mtime_ns == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dim": 64}, "dim 32 there, 64 here"),
        ({"seed": 3, "steps": 9}, "steps 6 there, 9 here; seed 0 there, 3 here"),
        ({"mixer": "gla"}, "mixer 'gla, softmax' there, 'gla' here"),
        ({"learning_rate": 0.1}, "learning_rate 0.004 there, 0.1 here"),
        ({"text": "more"}, "corpus_sha256"),
        ({"resume": False}, "already holds a run: go on with it with --resume"),
    ],
)
def test_another_run_is_refused(change, message, done, text, tmp_path):
    if "text" in change:
        other = tmp_path / "other.txt"
        other.write_text(TEXT + "more")
        change = {"text": (str(other),)}
    before = contents(done.run / "checkpoint-6")
    with pytest.raises(ValueError, match=message):
        train(replace(options(done.run, text, resume=True), **change), progress=False)
    assert contents(done.run / "checkpoint-6") == before


def test_folders_with_something_else_are_refused(text, tmp_path):
    (tmp_path / "mine.txt").write_text("precious")
    for out in (tmp_path, tmp_path / "mine.txt"):
        with pytest.raises(ValueError, match="is there already and holds no run"):
            train(options(out, text), progress=False)
    assert [p.name for p in tmp_path.iterdir()] == ["mine.txt"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"context": 4096}, "too short for a context of 4096: 3420 tokens to learn from and 180 to validate on"),
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


def test_a_full_disk_leaves_the_older_checkpoint(done, text, tmp_path, monkeypatch):
    run, real, calls = tmp_path / "run", checkpoint.write, []

    def write(*arguments):
        calls.append(arguments)
        if len(calls) > 3:  # three files a checkpoint
            raise OSError(28, os.strerror(28))
        real(*arguments)

    monkeypatch.setattr(checkpoint, "write", write)
    with pytest.raises(OSError, match=r"checkpoint-4 cannot be written: .*No space left on device; the checkpoints before it are whole"):
        train(options(run, text), progress=False)
    monkeypatch.setattr(checkpoint, "write", real)
    assert [p.name for p in run.glob("*checkpoint-*")] == ["checkpoint-2"]
    assert checkpoint.newest(run).name == "checkpoint-2"
    train(options(run, text, resume=True), progress=False)
    assert contents(run / "checkpoint-6") == contents(done.run / "checkpoint-6")


def test_weights_that_do_not_fit_on_the_disk(text, tmp_path):
    """The real thing: the kernel refuses files above a size."""
    resource, signal = importlib.import_module("resource"), importlib.import_module("signal")
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
        with pytest.raises(OSError, match=r"checkpoint-2 cannot be written: .*the checkpoints before it are whole"):
            train(options(tmp_path / "run", text), progress=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert not list((tmp_path / "run").glob("*checkpoint-*"))


def ask_to_end(monkeypatch, step: int) -> None:
    """SIGTERM in the middle of a step."""
    begin = Recorder.on_step_begin

    def asked(self, args, state, control, **kwargs):
        begin(self, args, state, control, **kwargs)
        if state.global_step == step:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Recorder, "on_step_begin", asked)


def test_a_terminated_run_saves_and_goes_on(done, text, tmp_path, monkeypatch, capsys):
    out, before = tmp_path / "run", signal.getsignal(signal.SIGTERM)
    with monkeypatch.context() as patch:
        ask_to_end(patch, 2)
        with pytest.raises(Terminated, match=r"^terminated after step 3, which is saved: go on with linattn train --resume --out "):
            train(options(out, text, save_every=None), progress=False)
    assert signal.getsignal(signal.SIGTERM) is before
    assert checkpoint.newest(out).name == "checkpoint-3"
    with monkeypatch.context() as patch:
        ask_to_end(patch, 4)
        assert main(["train", "--resume", "--out", str(out)]) == 143
    assert capsys.readouterr().err.splitlines()[-1].startswith("linattn: terminated after step 5, which is saved")
    with monkeypatch.context() as patch:
        ask_to_end(patch, 5)  # the last step: there is nothing to save beside what is saved anyway
        train(options(out, text, save_every=None, resume=True), progress=False)
    assert contents(out / "checkpoint-6") == contents(done.run / "checkpoint-6")


def test_a_clock_that_goes_back(done, text, tmp_path, monkeypatch):
    """The newest checkpoint is that of the highest step, whatever times stand on the files."""
    run = shutil.copytree(done.run, tmp_path / "run")
    for path in run.rglob("*"):
        os.utime(path, (0, 0) if "checkpoint-6" in str(path) else None)
    assert checkpoint.newest(run).name == "checkpoint-6"
    train(options(run, text, resume=True), progress=False)
    shutil.rmtree(run / "checkpoint-6")
    monkeypatch.setattr(time, "time", lambda: 0.0)
    monkeypatch.setattr(time, "time_ns", lambda: 0)
    train(options(run, text, resume=True), progress=False)
    assert contents(run / "checkpoint-6") == contents(done.run / "checkpoint-6")


def test_two_processes_never_write_to_one_run(done, text, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(done.run, run)
    with only_writer(run), pytest.raises(ValueError, match=rf"another process \(pid {os.getpid()}\) is writing to"):
        train(options(run, text, resume=True), progress=False)
    with only_writer(tmp_path / "new"), pytest.raises(ValueError, match="another process .* is writing to"):
        train(options(tmp_path / "new", text), progress=False)
    assert not (tmp_path / "new" / "run.json").exists(), "the options of one and the model of the other"


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


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("weights", "is damaged"),
        ("shapes", "does not fit its config: lm_head.weight has|does not fit its config: "),
        ("config", "is no config of a linattn model"),
        ("no mark", "holds no whole checkpoint"),
        ("gone", "does not exist"),
    ],
)
def test_damaged_runs(damage, message, done, tmp_path):
    run = tmp_path / "run"
    if damage != "gone":
        shutil.copytree(done.run, run)
    folder = run / "checkpoint-6"
    if damage == "weights":
        os.truncate(folder / "model.safetensors", 1000)
    elif damage == "config":
        (folder / "config.json").write_text('{"model_type": "llama"}')
        (folder / checkpoint.MARK).unlink()
    elif damage == "shapes":
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "dim": 10_000_000}))  # 100 TB, were it built first
        (folder / checkpoint.MARK).unlink()
    elif damage == "no mark":
        folder = run
        for mark in run.glob("*/complete.json"):
            mark.unlink()
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        load_run(folder)


def _edited(path, change):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("run.json", lambda path: os.truncate(path, 50)),
        ("run.json", lambda path: path.write_text("[]")),
        ("run.json", lambda path: _edited(path, lambda run: run.pop("same"))),
        ("run.json", lambda path: _edited(path, lambda run: run.pop("options"))),
        ("run.json", lambda path: _edited(path, lambda run: run.update(same=3))),
        ("run.json", lambda path: _edited(path, lambda run: run["options"].pop("text"))),
        ("run.json", lambda path: _edited(path, lambda run: run["options"].update(of_tomorrow=1))),
        ("run.json", lambda path: _edited(path, lambda run: run["options"].update(steps="six"))),
        ("metrics.jsonl", lambda path: path.write_text('{"step": 3}\n' + path.read_text())),
        ("metrics.jsonl", lambda path: path.write_text("{\n" + path.read_text())),
    ],
)
def test_a_damaged_run_is_named_and_stays(name, damage, done, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(done.run, run)
    damage(run / name)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert main(["train", "--resume", "--out", str(run)]) == 2
    err = capsys.readouterr().err
    assert str(run / name) in err and err.count("\n") == 1
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("change", [{"dim": "wide"}, {"layers": None}, {"mixer": 3}, {"mixer_options": []}])
def test_a_damaged_config_is_named(change, done, tmp_path, capsys):
    path = shutil.copytree(done.run, tmp_path / "run") / "checkpoint-6" / "config.json"
    _edited(path, lambda config: config.update(change))
    assert main(["generate", str(tmp_path / "run" / "checkpoint-6"), "--prompt", "a"]) == 2
    err = capsys.readouterr().err
    assert str(path) in err and err.count("\n") == 1


@pytest.mark.parametrize(
    "change", [lambda about: about.pop("losses"), lambda about: about.update(step=5), lambda about: about.pop("checksum")]
)
def test_a_damaged_mark_is_named(change, done, tmp_path):
    run = shutil.copytree(done.run, tmp_path / "run")
    _edited(run / "checkpoint-6" / "complete.json", change)
    with pytest.raises(ValueError, match="checkpoint-6/complete.json is damaged"):
        checkpoint.newest(run)


def test_a_mark_of_an_earlier_version(done, tmp_path):
    run = shutil.copytree(done.run, tmp_path / "run")
    _edited(run / "checkpoint-6" / "complete.json", lambda about: [about.pop(name) for name in ("sha256", "checksum")])
    load_run(run)


def flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["model", "optimizer", "schedule", "generators-0", "config", "complete"])
def test_one_flipped_bit_in_a_checkpoint(name, done, text, tmp_path, capsys):
    """First, middle and last byte: in the header and in the payload; generate and train --resume refuse it alike."""
    path = next((shutil.copytree(done.run, tmp_path / "run") / "checkpoint-6").glob(f"{name}.*"))
    whole = path.read_bytes()
    for bit in (0, 8 * 60 + 3, 4 * len(whole) + 5, 8 * len(whole) - 7):
        flip(path, bit)
        for command in (["generate", str(path.parent), "--prompt", "a"], ["train", "--resume", "--out", str(tmp_path / "run")]):
            assert main(command) == 2
            err = capsys.readouterr().err
            assert f"{path} is damaged" in err and err.count("\n") == 1
        path.write_bytes(whole)
    assert main(["generate", str(path.parent), "--prompt", "a", "--max-tokens", "1"]) == 0


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
    """The validations say what share of the tokens found no expert since the last one, and a resumed run says the same."""
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
