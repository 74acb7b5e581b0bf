"""Resuming: from the newest complete checkpoint, after failures, with the run's own options."""

import importlib
import os
import shutil
import signal
import time
from dataclasses import replace

import pytest

from linattn.cli.main import main
from linattn.state import only_writer
from linattn.train import Terminated, checkpoint, saved_options, train
from linattn.train.progress import Recorder
from tests.train.runs import TEXT, contents, options, rates


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
        ({"seed": 3, "steps": 3}, "steps 6 there, 3 here; seed 0 there, 3 here"),
        ({"mixer": "gla"}, "mixer 'gla, softmax' there, 'gla' here"),
        ({"learning_rate": 0.1}, "learning_rate 0.004 there, 0.1 here"),
        ({"text": "more"}, "corpus_sha256"),
        ({"resume": False}, "already holds a run: continue it with --resume"),
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


def test_a_full_disk_leaves_the_older_checkpoint(done, text, tmp_path, monkeypatch):
    run, real, calls = tmp_path / "run", checkpoint.write, []

    def write(*arguments):
        calls.append(arguments)
        if len(calls) > 3:  # three files a checkpoint
            raise OSError(28, os.strerror(28))
        real(*arguments)

    monkeypatch.setattr(checkpoint, "write", write)
    with pytest.raises(OSError, match=r"checkpoint-4 cannot be written: .*No space left on device; earlier checkpoints are complete"):
        train(options(run, text), progress=False)
    monkeypatch.setattr(checkpoint, "write", real)
    assert [p.name for p in run.glob("*checkpoint-*")] == ["checkpoint-2"]
    assert checkpoint.newest(run).name == "checkpoint-2"
    train(options(run, text, resume=True), progress=False)
    assert contents(run / "checkpoint-6") == contents(done.run / "checkpoint-6")


def test_weights_that_do_not_fit_on_the_disk(text, tmp_path):
    """A real limit: the kernel refuses files above a size."""
    resource, signal = importlib.import_module("resource"), importlib.import_module("signal")
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
        with pytest.raises(OSError, match=r"checkpoint-2 cannot be written: .*earlier checkpoints are complete"):
            train(options(tmp_path / "run", text), progress=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert not list((tmp_path / "run").glob("*checkpoint-*"))


def ask_to_end(monkeypatch, step: int, number: int = signal.SIGTERM) -> None:
    """A signal in the middle of a step."""
    begin = Recorder.on_step_begin

    def asked(self, args, state, control, **kwargs):
        begin(self, args, state, control, **kwargs)
        if state.global_step == step:
            signal.raise_signal(number)

    monkeypatch.setattr(Recorder, "on_step_begin", asked)


def test_a_terminated_run_saves_and_goes_on(done, text, tmp_path, monkeypatch, capsys):
    out, before = tmp_path / "run", signal.getsignal(signal.SIGTERM)
    with monkeypatch.context() as patch:
        ask_to_end(patch, 2)
        with pytest.raises(Terminated, match=r"^terminated after step 3, which is saved: continue with linattn train --resume --out "):
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


@pytest.fixture
def _interruptible():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background it is ignored
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_interruptible")
def test_an_interrupted_run_saves_and_says_how_to_go_on(done, text, tmp_path, monkeypatch, capsys):
    out = tmp_path / "run"
    words = ["train", "--mixer", "gla, softmax", "--text", str(text), *"--steps 6 --dim 32 --layers 2 --context 16".split()]
    words += "--batch-size 2 --save-every 2 --eval-every 3".split()
    with monkeypatch.context() as patch:
        ask_to_end(patch, 2, signal.SIGINT)
        assert main([*words, "--out", str(out)]) == 130
    said = capsys.readouterr().err.splitlines()[-1]
    assert said == f"linattn: interrupted after step 3, which is saved: continue with linattn train --resume --out {out}"
    train(replace(saved_options(out), resume=True), progress=False)
    assert contents(out / "checkpoint-6") == contents(done.run / "checkpoint-6")


@pytest.mark.usefixtures("_interruptible")
def test_a_second_interrupt_ends_at_once(text, tmp_path, monkeypatch):
    def twice(*_, **__):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Recorder, "on_step_begin", twice)
    with pytest.raises(KeyboardInterrupt):
        train(options(tmp_path / "run", text), progress=False)
    assert checkpoint.newest(tmp_path / "run") is None


@pytest.mark.parametrize("schedule", ["constant", "cosine", "wsd"])
def test_a_finished_run_is_prolonged(schedule, text, tmp_path):
    """A constant schedule has no horizon, so bits equal the longer run's; others continue with the longer one's rates."""
    asked = {"schedule": schedule, "warmup": 2, "eval_every": 1, "save_every": None}
    whole = train(options(tmp_path / "whole", text, steps=8, **asked), progress=False)
    train(options(tmp_path / "run", text, steps=5, **asked), progress=False)
    result = train(replace(saved_options(tmp_path / "run"), steps=8, resume=True), progress=False)
    assert [r["step"] for r in result.history] == list(range(1, 9))
    assert saved_options(tmp_path / "run").steps == 8
    if schedule == "constant":
        assert contents(result.run / "checkpoint-8") == contents(whole.run / "checkpoint-8")
    assert rates(result.run / "checkpoint-8")[5:] == rates(whole.run / "checkpoint-8")[5:]
    with pytest.raises(ValueError, match="steps 8 there, 7 here"):
        train(replace(saved_options(tmp_path / "run"), steps=7, resume=True), progress=False)


def test_a_clock_that_goes_back(done, text, tmp_path, monkeypatch):
    """The newest checkpoint has the highest step, independent of file times."""
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
