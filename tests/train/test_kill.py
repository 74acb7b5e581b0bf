"""A run killed at any moment and resumed has, bit for bit, the weights of an uninterrupted one."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from linattn.train import checkpoint
from tests.train.runs import TEXT


def metrics(run: Path) -> list[dict]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "seconds"} for line in lines]


@pytest.mark.slow
def test_killed_again_and_again(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    command = [sys.executable, "-m", "tests.train.lives", str(tmp_path), str(tmp_path / "text.txt")]
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lives = json.loads(done.stdout)
    assert lives["points"] > 4
    assert lives["moments"] > 1
    whole = tmp_path / "whole"
    for name in ("points", "moments"):
        run = tmp_path / name
        for folder in sorted(whole.glob("checkpoint-*")):
            assert checkpoint.marked(run / folder.name) is not None
            for file in folder.glob("*.safetensors"):
                assert (run / folder.name / file.name).read_bytes() == file.read_bytes(), (name, folder.name, file.name)
        assert metrics(run) == metrics(whole)
        assert not list(run.glob(".*.part"))


@pytest.fixture
def launched(tmp_path):
    """Start ``torchrun`` with two processes of ``linattn train``."""
    (tmp_path / "text.txt").write_text(TEXT)
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "linattn", "train"]
    small = ["--mixer", "gla", "--dim", "32", "--layers", "1", "--context", "16", "--batch-size", "2"]
    begun = []

    def launch(out: str, *words: str) -> subprocess.Popen:
        given = [] if "--resume" in words else ["--text", str(tmp_path / "text.txt"), *small]
        command = [*torchrun, "--out", str(tmp_path / out), *given, *words]
        begun.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True))
        return begun[-1]

    yield launch
    for process in begun:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def ended(process: subprocess.Popen) -> str:
    """Wait for a process that must succeed; returns its standard error."""
    err = process.communicate(timeout=300)[1]
    assert process.returncode == 0, err
    return err


def same_weights(one: Path, other: Path) -> None:
    files = sorted(f.name for f in one.glob("*.safetensors"))
    assert "generators-1.safetensors" in files
    for name in files:
        assert (one / name).read_bytes() == (other / name).read_bytes()


@pytest.mark.slow
def test_two_processes_go_on_exactly(launched, tmp_path):
    ended(launched("whole", "--steps", "4", "--save-every", "2"))
    subprocess.run(["cp", "-r", str(tmp_path / "whole"), str(tmp_path / "cut")], check=True)
    (tmp_path / "cut" / "checkpoint-4" / checkpoint.MARK).unlink()
    ended(launched("cut", "--resume"))
    same_weights(tmp_path / "whole" / "checkpoint-4", tmp_path / "cut" / "checkpoint-4")


@pytest.mark.slow
def test_two_processes_are_terminated(launched, tmp_path):
    """SIGTERM to one of them, then to torchrun and all its processes, as from a batch system: saved at one step, and resumed."""
    run, step = tmp_path / "run", 0
    for whom, words in (("one", ["--steps", "300", "--eval-every", "1"]), ("all", ["--resume"])):
        process = launched("run", *words)
        while not (run / "metrics.jsonl").exists() or (run / "metrics.jsonl").read_text().count("\n") <= step:
            assert process.poll() is None
            time.sleep(0.01)
        if whom == "one":
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            os.kill(int(children[-1]), signal.SIGTERM)
        else:
            os.killpg(process.pid, signal.SIGTERM)
        err = process.communicate(timeout=120)[1]
        before, step = step, checkpoint.marked(checkpoint.newest(run))["step"]
        assert before < step < 300 and err.count(f"terminated after step {step}, which is saved") == 1, err  # of both
