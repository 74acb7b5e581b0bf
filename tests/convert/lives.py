"""Converts a tiny model in processes killed by SIGKILL, repeatedly, until one finishes.

    python -m tests.convert.lives FOLDER TEACHER TEXT

Imports happen once, and each process is a fork. Prints the number of processes as one line of JSON.
"""

import json
import os
import random
import sys
from pathlib import Path

import torch
import transformers

from linattn.data import corpus
from linattn.distill.conversion import convert
from tests.arm import arm

OPTIONS = {"mixer": "gated_deltanet", "keep": 1, "tokens1": 256, "tokens2": 256, "tokens3": 128, "context": 16, "batch_size": 4}


def live(out: Path, teacher: str, text: str, die_at: int) -> int | None:
    """Run a process that dies at its ``die_at``-th fsync, rename or replace; returns the number of calls if it finished."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            left = arm(die_at)
            convert(teacher, text=[text], out=out, resume=True, save_every=2, progress=False, **OPTIONS)
            os.write(writer, str(die_at - left[0]).encode())
            os._exit(0)
        except BaseException:
            import traceback

            traceback.print_exc()
        os._exit(1)
    os.close(writer)
    status = os.waitpid(pid, 0)[1]
    told = os.read(reader, 100)
    os.close(reader)
    if os.WIFSIGNALED(status):
        return None
    if os.WEXITSTATUS(status):
        sys.exit("a life ended with an error")
    return int(told)


def main(folder: Path, teacher: str, text: str) -> None:
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    corpus((text,))
    calls = live(folder / "whole", teacher, text, sys.maxsize)
    assert calls is not None
    dice, lives = random.Random(0), 1
    while live(folder / "cut", teacher, text, dice.randrange(calls // 2)) is None:
        lives += 1
    print(json.dumps(lives))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
