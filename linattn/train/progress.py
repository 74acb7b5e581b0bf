"""What a run tells while it goes: a line of metrics per validation in its folder, a bar on the terminal."""

from __future__ import annotations

import json
import math
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import TrainerCallback

from linattn.train.speed import Meter


class Recorder(TrainerCallback):
    """Keeps the history; ``seconds`` counts training alone, without validations and checkpoints."""

    meter: Meter | None = None  # of what speed() gives beside tokens a second

    def __init__(
        self, path: Path, history: list[dict[str, Any]], seen: dict[str, Any], *, step_tokens: int, bits_per_byte: Callable[[float], float]
    ) -> None:
        """``seen`` is what :meth:`seen` gave at the last checkpoint."""
        self._first = (seen.get("step", 0), seen["seconds"])
        self.path, self.history = path, history
        self.seconds: float = seen["seconds"]
        self._losses: list[float] = list(seen["losses"])  # since the last validation
        self._counts: dict[str, Any] = dict(seen.get("counts", {}))  # of tokens, what mixtures of experts told since then
        self.step_tokens, self.bits_per_byte = step_tokens, bits_per_byte
        self._since: float | None = None  # when what is not yet counted began; None: the clock stands

    def seen(self) -> dict[str, Any]:
        """What a resumed run has to know of this one."""
        return {"seconds": self.seconds, "losses": self._losses, "counts": {name: int(n) for name, n in self._counts.items()}}

    def count(self, counts: dict[str, Any]) -> None:
        """Add what the feed-forwards of a pass told of their tokens."""
        for name, n in counts.items():
            self._counts[name] = self._counts.get(name, 0) + n

    def speed(self, step: int) -> dict[str, float]:
        """Tokens a second since this process began, with what the meter makes of it, after ``step`` steps."""
        tokens = (step - self._first[0]) * self.step_tokens / max(self.seconds - self._first[1], 1e-9)
        return {"tokens_per_second": tokens} if self.meter is None else self.meter.measured(tokens)

    def on_step_begin(self, args, state, control, **kwargs) -> None:
        self._since = time.perf_counter() if self._since is None else self._since

    def on_step_end(self, args, state, control, **kwargs) -> None:
        self._count()

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        if "loss" not in (logs or {}):
            return
        self._count()  # reading the loss waited for the device
        if not math.isfinite(logs["loss"]):
            raise ValueError(f"the loss is {logs['loss']} at step {state.global_step}: start again with a lower learning rate")
        self._losses.append(logs["loss"])

    def on_save(self, args, state, control, **kwargs) -> None:
        self._since = None

    def _count(self) -> None:
        now = time.perf_counter()
        self.seconds += now - (self._since or now)
        self._since = now

    def on_evaluate(self, args, state, control, metrics=None, **kwargs) -> None:
        record = {
            "step": state.global_step,
            "tokens": state.global_step * self.step_tokens,
            "train_loss": sum(self._losses) / len(self._losses) if self._losses else None,
            "validation_bits_per_byte": self.bits_per_byte(metrics["eval_loss"]),
            "seconds": self.seconds,
        }
        if self._counts.get("tokens"):
            record["dropped"] = int(self._counts.get("dropped", 0)) / int(self._counts["tokens"])
        self._losses, self._counts, self._since = [], {}, None
        self.history.append(record)
        if state.is_world_process_zero:
            with self.path.open("a") as file:
                file.write(json.dumps(record) + "\n")


class Ending(TrainerCallback):
    """Within it SIGTERM and Ctrl-C let the step in progress end, and a checkpoint be written, before the training ends.

    A second Ctrl-C interrupts at once. A process among several ends at once as ever: they would have to agree on the step. So does one
    whose training runs in another thread than the first, where Python hears no signals.
    """

    def __init__(self, processes: int) -> None:
        self.asked: int | None = None  # the signal
        self._hears = processes == 1 and threading.current_thread() is threading.main_thread()
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if self._hears:
            self._before = {number: signal.signal(number, self._ask) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _ask(self, number: int, _: object) -> None:
        if number == signal.SIGINT:
            if self.asked is not None:
                raise KeyboardInterrupt
            print("ending after this step; Ctrl-C again ends at once, without saving", file=sys.stderr)
        self.asked = number

    def on_step_end(self, args, state, control, **kwargs) -> None:
        if self.asked is not None and state.global_step < state.max_steps:
            control.should_save = control.should_training_stop = True


class Bar(TrainerCallback):
    """Steps, loss, bits per byte of the last validation, tokens that experts dropped before it, speed, MFU, memory and time to go."""

    def __init__(self, title: str, recorder: Recorder) -> None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[said]}"),
            TimeRemainingColumn(),
        )
        self._title, self._recorder, self._bar = title, recorder, Progress(*columns, console=Console(stderr=True))
        self._loss = ""

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        if not state.is_world_process_zero:
            return
        self._bar.add_task(self._title, total=state.max_steps, completed=state.global_step, said="")
        self._bar.start()

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        if "loss" in (logs or {}):
            self._loss = f"loss {logs['loss']:.3f}"

    def on_step_end(self, args, state, control, **kwargs) -> None:
        if not self._bar.tasks:
            return
        speed = self._recorder.speed(state.global_step)
        last = self._recorder.history[-1:]
        said = [self._loss, *(f"{r['validation_bits_per_byte']:.3f} bits/byte" for r in last)]
        said += [f"{r['dropped']:.1%} dropped" for r in last if "dropped" in r]
        said.append(f"{speed['tokens_per_second']:,.0f} tokens/s")
        said += [f"{speed['mfu']:.0%} MFU"] if "mfu" in speed else []
        said += [f"{speed['memory_gb']:.1f} GB"] if "memory_gb" in speed else []
        self._bar.update(self._bar.tasks[0].id, completed=state.global_step, said=" · ".join(filter(None, said)))

    def stop(self) -> None:
        """Leave the terminal as it was, also after an error."""
        self._bar.stop()
