"""Small trainer of experiments: AdamW with warm-up and cosine, in memory, without checkpoints.

:mod:`linattn.train` trains on text with checkpoints, but its overhead of a millisecond per step equals two of these steps on a GPU. Here
the whole step with the optimizer is one CUDA graph per shape of batch. It saves no checkpoints, as a run takes seconds.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

EAGER = 3  # eager steps of each shape before capture, which compile kernels and create the optimizer's state
AHEAD = 4  # steps that the host may be ahead of the GPU
Schedule = Callable[[int, int], float]  # (step from 0, number of steps) -> share of the peak learning rate


def warmup_times_cosine(step: int, steps: int) -> float:
    """A cosine to 0 over all steps, times a linear warm-up over the first twentieth."""
    return min((step + 1) / _warmup(steps), 1.0) * _cosine(step, steps)


def warmup_then_cosine(step: int, steps: int) -> float:
    """A linear warm-up over the first twentieth of the steps, then a cosine to 0 over the others."""
    warm = _warmup(steps)
    return (step + 1) / warm if step < warm else _cosine(step - warm, max(1, steps - warm))


def _warmup(steps: int) -> int:
    return max(1, steps // 20)


def _cosine(step: int, steps: int) -> float:
    return 0.5 * (1 + math.cos(math.pi * step / steps))


@dataclass(frozen=True)
class Optimization:
    """Optimizer settings: AdamW with betas of 0.9 and 0.95, gradients clipped at a norm of 1.

    Args:
        steps: optimizer steps.
        learning_rate: peak learning rate.
        weight_decay: factor for matrices; norms, biases and time constants are not decayed.
        schedule: function of the step that gives the share of the peak.
        fused: use torch's fused AdamW, whose rounding differs from that of the others.
    """

    steps: int
    learning_rate: float
    weight_decay: float
    schedule: Schedule = warmup_then_cosine
    fused: bool = True


class Batches:
    """Tensors on a device, and static memory for one batch of their rows, for a captured step."""

    def __init__(self, data: Sequence[Tensor], batch_size: int, device: torch.device) -> None:
        self.data = [t.to(device) for t in data]
        self.size = min(batch_size, len(self.data[0]))
        self.batch = [t[: self.size].clone() for t in self.data]
        self.graph: torch.cuda.CUDAGraph | None = None
        self.loss = torch.zeros((), device=device)
        self.seen = 0

    def load(self, rows: Tensor) -> None:
        """Copy the rows with these indices to the batch."""
        for place, t in zip(self.batch, self.data, strict=True):
            torch.index_select(t, 0, rows, out=place)


class Trainer:
    """Training of ``model`` that minimises ``loss`` of a batch.

    On a GPU :meth:`replay` captures each shape of batch after :data:`EAGER` steps and replays it from then on.
    """

    def __init__(self, model: nn.Module, loss: Callable[..., Tensor], how: Optimization) -> None:
        self.model, self.loss, self.how = model, loss, how
        device = next(model.parameters()).device
        self.captured = device.type == "cuda"
        self.rate = torch.zeros((), device=device)
        matrices = [p for p in model.parameters() if p.ndim >= 2]
        others = [p for p in model.parameters() if p.ndim < 2]
        groups = [{"params": matrices, "weight_decay": how.weight_decay}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(
            [g for g in groups if g["params"]],
            lr=self.rate if self.captured else 0.0,
            betas=(0.9, 0.95),
            fused=how.fused or None,
            capturable=self.captured,
        )
        self.pool = torch.cuda.graph_pool_handle() if self.captured else None
        self.done, self.ahead = 0, deque[torch.cuda.Event]()

    def step(self, *batch: object) -> Tensor:
        """Run a step on ``batch`` and return its loss."""
        self._set_rate()
        return self._step(*batch)

    def replay(self, batches: Batches, rows: Tensor) -> Tensor:
        """Run a step on the rows with these indices and return its loss, which the next step on ``batches`` overwrites."""
        self._set_rate()
        batches.load(rows)
        batches.seen += 1
        if not self.captured or batches.seen <= EAGER:
            batches.loss = self._step(*batches.batch)
        else:
            if batches.graph is None:
                self._capture(batches)
            cast(torch.cuda.CUDAGraph, batches.graph).replay()
        if self.captured:
            self._wait()
        return batches.loss

    def _set_rate(self) -> None:
        rate = self.how.learning_rate * self.how.schedule(self.done, self.how.steps)
        self.done += 1
        if self.captured:
            self.rate.fill_(rate)
        else:
            for group in self.optimizer.param_groups:
                group["lr"] = rate

    def _step(self, *batch: object) -> Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.loss(*batch)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss.detach()

    def _capture(self, batches: Batches) -> None:
        """Capture the step without executing it."""
        batches.graph = torch.cuda.CUDAGraph()
        here = torch.cuda.current_stream()
        stream = None if here == torch.cuda.default_stream() else here  # capture is impossible on the default stream
        with torch.cuda.graph(batches.graph, pool=self.pool, stream=stream, capture_error_mode="thread_local"):
            batches.loss = self._step(*batches.batch)

    def _wait(self) -> None:
        event = torch.cuda.Event()
        event.record()
        self.ahead.append(event)
        if len(self.ahead) > AHEAD:
            self.ahead.popleft().synchronize()
