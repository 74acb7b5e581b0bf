"""Trains a tiny model in processes killed by SIGKILL, repeatedly, until one finishes.

    python -m tests.train.lives FOLDER TEXT

Imports happen once, by a step in this process, and each process is a fork of it, without threads. Prints the number of processes
for each kind of kill as one line of JSON.
"""

import json
import os
import random
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import torch

from linattn.train import TrainOptions
from linattn.train.training import train
from tests.arm import arm

STEPS = 6


def options(folder: Path, text: str) -> TrainOptions:
    small = {"steps": STEPS, "dim": 32, "layers": 2, "context": 16, "batch_size": 2, "save_every": 2, "eval_every": 3}
    small |= {"dtype": "bf16", "accumulate": 2, "optimizer": "muon"}  # in float32, one pass a step, AdamW: test_resume
    return TrainOptions(mixer="gla", text=(text,), out=folder, resume=True, **small)


def live(folder: Path, text: str, die_at: int | None = None, after: float | None = None, counted: Path | None = None) -> bool:
    """Run a process that dies at its ``die_at``-th fsync, rename or replace, or ``after`` seconds. True if it finished.

    ``counted``: a file that gets the number of calls that order files.
    """
    pid = os.fork()
    if pid == 0:
        try:
            left = arm(sys.maxsize if die_at is None else die_at)
            train(options(folder, text), progress=False)
            if counted is not None:
                counted.write_text(str(sys.maxsize - left[0]))
            os._exit(0)
        except BaseException:
            import traceback

            traceback.print_exc()
        os._exit(1)
    if after is not None:
        time.sleep(after)
        os.kill(pid, signal.SIGKILL)
    status = os.waitpid(pid, 0)[1]
    if os.WIFSIGNALED(status):
        return False
    if os.WEXITSTATUS(status):
        sys.exit("a life ended with an error")
    return True


def main(folder: Path, text: str) -> None:
    torch.set_num_threads(1)
    train(replace(options(folder / "first", text), steps=1), progress=False)
    assert threading.active_count() == 1
    begun = time.perf_counter()
    assert live(folder / "whole", text, counted=folder / "calls")
    calls = int((folder / "calls").read_text())  # of a whole life
    whole = time.perf_counter() - begun
    dice, lives = random.Random(0), {}
    for name in ("points", "moments"):
        lives[name] = 1
        while not live(
            folder / name,
            text,
            die_at=dice.randrange(2 * calls // 5) if name == "points" else None,
            after=dice.uniform(0.02, 0.35) * whole if name == "moments" and lives[name] < 8 else None,
        ):
            lives[name] += 1
    print(json.dumps(lives))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
