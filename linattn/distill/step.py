"""One optimizer step of a stage. On an NVIDIA GPU steps are captured as a CUDA graph after the first few."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from linattn.distill.job import Job
from linattn.distill.stages import Stage, loss_of

CLIP = 1.0  # largest gradient norm
WARM_UP = 3  # steps before the capture: kernels are compiled, workspaces and optimizer states allocated


def optimizer_of(parameters: list[torch.nn.Parameter], stage: Stage, device: torch.device) -> torch.optim.Optimizer:
    """AdamW without weight decay; on an NVIDIA GPU one kernel that a graph can capture."""
    fused = {"fused": True, "capturable": True} if device.type == "cuda" else {}
    return torch.optim.AdamW(parameters, lr=stage.rate, betas=(0.9, 0.95), weight_decay=0.0, **fused)


def saved(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """State of ``optimizer`` with learning rates as numbers."""
    state = optimizer.state_dict()
    return {**state, "param_groups": [{**group, "lr": float(group["lr"])} for group in state["param_groups"]]}


class Step:
    """Optimizer steps of ``stage``, called with the tokens [B, T] of each.

    Args:
        job: models and options.
        stage: the stage; its parameters are those of the optimizer.
        optimizer: that of :func:`optimizer_of`; its learning rate becomes a tensor on a GPU.
        capture: capture the step as a CUDA graph, on a GPU in a single process; one that cannot be captured runs eagerly, with a warning.
    """

    def __init__(self, job: Job, stage: Stage, optimizer: torch.optim.Optimizer, *, capture: bool = True) -> None:
        self.job, self.stage, self.optimizer = job, stage, optimizer
        self._parameters = [p for group in optimizer.param_groups for p in group["params"]]
        capture = capture and job.device.type == "cuda" and job.group.count == 1
        self._left = WARM_UP if capture else -1  # eager steps before the capture; -1: all are eager
        self._graph: torch.cuda.CUDAGraph | None = None
        self._ids = self._loss = torch.empty(0)
        if job.device.type == "cuda":
            rate = torch.zeros((), device=job.device)
            for group in optimizer.param_groups:
                group["lr"] = rate

    def __call__(self, step: int, ids: Tensor) -> Tensor:
        """Run step number ``step`` on ``ids``; returns the loss."""
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(self.stage.rate_at(step))
            else:
                group["lr"] = self.stage.rate_at(step)
        if self._left == 0:
            self._capture(ids)
        self._left -= self._left > 0
        if self._graph is None:
            return self._step(ids)
        self._ids.copy_(ids)
        self._graph.replay()
        return self._loss.clone()

    def _step(self, ids: Tensor) -> Tensor:
        loss = gradients(self.job, self.stage, ids)
        self.job.group.average([loss, *(p.grad for p in self._parameters if p.grad is not None)])
        torch.nn.utils.clip_grad_norm_(self._parameters, CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss

    def _capture(self, ids: Tensor) -> None:
        """Capture a step with the shapes of ``ids``, without running it."""
        self._left, self._ids, graph = -1, ids.clone(), torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                self._loss = self._step(self._ids)
        except RuntimeError as error:
            self.optimizer.zero_grad(set_to_none=True)
            torch.cuda.synchronize()
            warnings.warn(f"a step of stage {self.stage.number} cannot be captured and runs kernel by kernel: {error}", stacklevel=2)
        else:
            self._graph = graph


def gradients(job: Job, stage: Stage, ids: Tensor) -> Tensor:
    """Accumulate the gradients of the mean loss of ``ids`` [B, T] in parts; returns the loss."""
    total = torch.zeros((), device=ids.device)
    for part in ids.chunk(min(job.options.accumulate, len(ids))):
        with job.precision():
            loss = loss_of(stage, job.student, job.teacher, part) * (len(part) / len(ids))
        loss.backward()
        total += loss.detach()
    return total
