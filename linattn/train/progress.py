"""Progress of a running training: a line of metrics per validation in its folder, and a bar on the terminal."""

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

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from linattn.train.speed import Meter


class Recorder(TrainerCallback):
    """Record of losses, speed and validations; ``seconds`` excludes validations and checkpoints."""

    meter: Meter | None = None  # for the model FLOPs utilisation and memory that speed() returns

    def __init__(
        self, path: Path, history: list[dict[str, Any]], seen: dict[str, Any], *, step_tokens: int, bits_per_byte: Callable[[float], float]
    ) -> None:
        """``seen``: value of :meth:`seen` at the last checkpoint."""
        self._first = (seen.get("step", 0), seen["seconds"])  # start of the log's interval
        self.path, self.history = path, history
        self.seconds: float = seen["seconds"]
        self._losses: list[float] = list(seen["losses"])  # since the last validation
        self._counts: dict[str, Any] = dict(seen.get("counts", {}))  # tokens that mixtures of experts counted since the last validation
        self.step_tokens, self.bits_per_byte = step_tokens, bits_per_byte
        self._since: float | None = None  # start of the time not yet added to seconds; None: paused
        self._rate: float | None = None  # tokens per second between the last two logs

    def seen(self) -> dict[str, Any]:
        """Values from which a resumed run continues this record: seconds, losses and counts."""
        return {"seconds": self.seconds, "losses": self._losses, "counts": {name: int(n) for name, n in self._counts.items()}}

    def count(self, counts: dict[str, Any]) -> None:
        """Add the token counts that the feed-forwards of one pass reported."""
        for name, n in counts.items():
            self._counts[name] = self._counts.get(name, 0) + n

    def log_speed(self, step: int) -> dict[str, float]:
        """End an interval of the log after ``step`` steps, whose loss has been read, and return its :meth:`speed`."""
        self._count()
        if step > self._first[0]:
            self._rate = self._tokens_per_second(step)
            self._first = (step, self.seconds)
        return self.speed(step)

    def speed(self, step: int) -> dict[str, float]:
        """Tokens per second of the last interval of the log, until it ends of the first one, with the meter's utilisation and memory."""
        rate = self._tokens_per_second(step) if self._rate is None else self._rate
        return {"tokens_per_second": rate} if self.meter is None else self.meter.measured(rate)

    def _tokens_per_second(self, step: int) -> float:
        """Speed since the current interval of the log began."""
        return (step - self._first[0]) * self.step_tokens / max(self.seconds - self._first[1], 1e-9)

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._since = time.perf_counter() if self._since is None else self._since

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._count()

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: dict[str, float] | None = None, **kwargs: Any
    ) -> None:
        if logs is None or "loss" not in logs:
            return
        if not math.isfinite(logs["loss"]):
            raise ValueError(f"the loss is {logs['loss']} at step {state.global_step}: restart with a lower learning rate")
        self._losses.append(logs["loss"])

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._since = None

    def _count(self) -> None:
        now = time.perf_counter()
        self.seconds += now - (self._since or now)
        self._since = now

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, metrics: dict[str, float] | None = None, **kwargs: Any
    ) -> None:
        assert metrics is not None  # Trainer always passes them
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
    """Context in which SIGTERM and Ctrl-C end the training after the current step, with a checkpoint.

    Several processes agree on the step: a signal that any of them receives ends all after the next step. A second Ctrl-C to a single
    process interrupts at once. Outside the main thread, where Python handles no signals, they keep their usual effect.
    """

    def __init__(self, args: TrainingArguments) -> None:
        self.received: int | None = None  # number of the signal that ends the training, in every process
        self._several, self._device = args.world_size > 1, args.device
        self._own = 0  # number of the signal that this process received
        self._reduced: torch.Tensor | None = None  # largest number of all processes at the end of the step before
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._receive) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _receive(self, number: int, _: object) -> None:
        if number == signal.SIGINT and not self._several:  # torchrun forwards the terminal's signal
            if self._own:
                raise KeyboardInterrupt
            print("ending after this step; Ctrl-C again ends at once, without saving", file=sys.stderr)
        self._own = number

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if number := self._agreed() if self._several else self._own:
            self.received = number
            if state.global_step < state.max_steps:
                control.should_save = control.should_training_stop = True

    def _agreed(self) -> int:
        """Exchange the numbers of this step, and return the largest of the step before, whose value is ready without a wait."""
        before, self._reduced = self._reduced, torch.full((), self._own, device=self._device)
        torch.distributed.all_reduce(self._reduced, torch.distributed.ReduceOp.MAX)
        return 0 if before is None else int(before)


class Bar(TrainerCallback):
    """Progress bar: steps, loss, bits per byte and dropped tokens of the last validation, speed, MFU, memory and remaining time."""

    def __init__(self, title: str, recorder: Recorder) -> None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(),
        )
        self._title, self._recorder, self._bar = title, recorder, Progress(*columns, console=Console(stderr=True))
        self._loss = ""

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        self._bar.add_task(self._title, total=state.max_steps, completed=state.global_step, figures="")
        self._bar.start()

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: dict[str, float] | None = None, **kwargs: Any
    ) -> None:
        if logs is not None and "loss" in logs:
            self._loss = f"loss {logs['loss']:.3f}"

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if not self._bar.tasks:
            return
        speed = self._recorder.speed(state.global_step)
        last = self._recorder.history[-1:]
        figures = [self._loss, *(f"{r['validation_bits_per_byte']:.3f} bits/byte" for r in last)]
        figures += [f"{r['dropped']:.1%} dropped" for r in last if "dropped" in r]
        figures.append(f"{speed['tokens_per_second']:,.0f} tokens/s")
        figures += [f"{speed['mfu']:.0%} MFU"] if "mfu" in speed else []
        figures += [f"{speed['memory_gb']:.1f} GB"] if "memory_gb" in speed else []
        self._bar.update(self._bar.tasks[0].id, completed=state.global_step, figures=" · ".join(filter(None, figures)))

    def stop(self) -> None:
        """Stop drawing and restore the terminal, also after an error."""
        self._bar.stop()
