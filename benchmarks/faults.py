"""Fault injection by kills at random moments: ``python -m benchmarks.faults --kills 200``.

Processes that train a tiny model, or save a state repeatedly, are ended by SIGKILL or SIGTERM after a random time. After every kill
each file on disk must be complete (by its checksum) or an ignored leftover, and the training, resumed until it finishes, must have
the weights, bit for bit, of an undisturbed one. The processes are forks of one that has imported everything.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks import positive
from linattn.state import writable

TEXT = "the quick brown fox jumps over the lazy dog. " * 80
SIGNALS = (signal.SIGKILL, signal.SIGTERM)
STATES = 2  # that the saving processes write in turn


def killed(work: Callable[[], None], after: float | None, number: signal.Signals) -> str:
    """Run ``work`` in a fork; returns its outcome: "lived", "killed", "saved" (a training's response to SIGTERM) or "failed"."""
    pid = os.fork()
    if pid == 0:
        sink = os.open(os.devnull, os.O_WRONLY)
        os.dup2(sink, 2)
        try:
            os._exit(_exit_code(work))
        finally:
            os._exit(1)
    end = time.monotonic() + (after or 0.0)
    while after is not None and time.monotonic() < end:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return _end(status)
        time.sleep(0.005)
    if after is not None:
        os.kill(pid, number)
    return _end(os.waitpid(pid, 0)[1])


def _end(status: int) -> str:
    if os.WIFSIGNALED(status):
        return "killed"
    return {0: "lived", 143: "saved"}.get(os.WEXITSTATUS(status), "failed")


def _exit_code(work: Callable[[], None]) -> int:
    from linattn.train import Terminated

    try:
        work()
    except Terminated:
        return 143
    except BaseException:
        return 1
    return 0


def training(folder: Path, text: Path) -> Callable[[], None]:
    """Run a training of 6 steps once, saving after each second one."""
    from linattn.train import TrainOptions
    from linattn.train.training import train

    def work() -> None:
        small = {"steps": 6, "dim": 32, "layers": 1, "context": 16, "batch_size": 2, "save_every": 2, "eval_every": 3}
        train(TrainOptions(mixer="gla", text=(text,), out=folder, resume=True, **small), progress=False)  # type: ignore[arg-type]

    return work


def saving(path: Path) -> Callable[[], None]:
    """Save one of two states over the other until killed, some thousand numbers each."""
    import torch

    from linattn.state import State

    def work() -> None:
        states = [State([{"S": torch.full((1, 20_000), float(i)), "position": torch.tensor([i])}]) for i in range(STATES)]
        for turn in range(10_000):
            states[turn % STATES].save(path)

    return work


def whole_state(path: Path) -> str | None:
    """Damage of the state in ``path``; None if there is none."""
    from linattn.state import State

    try:
        state = State.load(path)
    except FileNotFoundError:
        return None  # killed before the first was written
    except ValueError as error:
        return str(error)
    values = state.layers[0]["S"]
    return None if bool((values == state.position[0]).all()) else "holds parts of two states"


def whole_run(folder: Path) -> str | None:
    """Damage of the checkpoints of a run; None if there is none."""
    from linattn.train import checkpoint

    try:
        for path in folder.glob("checkpoint-*"):
            if checkpoint.marked(path) is not None:
                checkpoint.check(path)
    except ValueError as error:
        return str(error)
    return None


def differences(run: Path, undisturbed: Path) -> list[str]:
    """Files of the last checkpoint that differ in bytes."""
    last = "checkpoint-6"
    files = sorted((undisturbed / last).glob("*.safetensors"))
    return [file.name for file in files if (run / last / file.name).read_bytes() != file.read_bytes()]


def disturb(kills: int, seed: int, folder: Path) -> dict[str, Any]:
    """Kill ``kills`` processes, every fourth in training and the others while saving; returns the results."""
    dice, ends, findings = random.Random(seed), Counter[str](), []  # noqa: S311
    text = folder / "text.txt"
    text.write_text(TEXT)
    undisturbed = folder / "undisturbed"
    begun = time.perf_counter()
    if killed(training(undisturbed, text), None, signal.SIGKILL) != "lived":
        raise RuntimeError("the undisturbed training did not end")
    long, runs, done, turns = time.perf_counter() - begun, 0, 0, 0
    run = folder / "run-0"
    while done < kills:
        number, turns, begun = dice.choice(SIGNALS), turns + 1, time.perf_counter()
        if turns % 4:
            path = folder / f"state-{done // 10}"
            end, wrong, kind = killed(saving(path), dice.uniform(0.02, 0.3), number), whole_state(path), "saving"
        else:
            end, wrong, kind = killed(training(run, text), dice.uniform(0.05, 0.9) * long, number), whole_run(run), "training"
            long = min(long, time.perf_counter() - begun) if end == "lived" else long  # the first one had a cold disk cache
        ends[f"{kind}, {number.name}: {end}"] += 1
        done += end != "lived"
        findings += [f"kill {done}: {wrong}"] if wrong else [f"kill {done}: a {kind} failed"] if end == "failed" else []
        if kind == "training" and end == "lived":
            findings += [f"{run.name}: {name} differs" for name in differences(run, undisturbed)]
            runs, run = runs + 1, folder / f"run-{runs + 1}"
    if killed(training(run, text), None, signal.SIGKILL) != "lived":
        findings.append(f"{run.name} does not go on")
    findings += [f"{run.name}: {name} differs" for name in differences(run, undisturbed)]
    return {"kills": done, "ends": dict(sorted(ends.items())), "runs_through": runs + 1, "findings": findings}


def main(args: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults", description=__doc__)
    parser.add_argument("--kills", type=positive, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="the JSON file that is written")
    asked = parser.parse_args(args)
    out = None if asked.out is None else writable(asked.out)
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="linattn-faults-") as name:
        os.environ["XDG_CACHE_HOME"] = name
        import torch

        torch.set_num_threads(1)  # threads do not survive a fork
        log = disturb(asked.kills, asked.seed, Path(name))
    from linattn.report.machine import machine

    command = f"python -m benchmarks.faults --kills {asked.kills} --seed {asked.seed}"
    log = {"command": command, "date": datetime.now(UTC).date().isoformat(), "machine": machine(), **log}
    log["seconds"] = round(time.perf_counter() - begun)
    text = json.dumps(log, indent=1)
    print(text)
    if out is not None:
        out.write_text(text + "\n", encoding="utf-8")
    return 1 if log["findings"] else 0


if __name__ == "__main__":
    sys.exit(main())
