"""Estimate of a conversion's tokens, time and memory, measured by one step of each stage on its device."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch

from linattn.distill.job import Job, job_of, source_of
from linattn.distill.options import ConvertOptions
from linattn.distill.stages import TITLES, Stage, trained
from linattn.distill.step import gradients

_STATE = 3  # tensors beside each trained parameter: its gradient and AdamW's two moments


@dataclass(frozen=True)
class StagePlan:
    """One stage: ``tokens`` in ``steps`` steps of ``seconds`` each, with ``nbytes`` of memory at its peak."""

    title: str
    steps: int
    tokens: int
    seconds: float
    nbytes: int


@dataclass(frozen=True)
class Plan:
    """Plan of a conversion, as text with one line per stage.

    Args:
        teacher, student: numbers of parameters.
        mixer: the student's pattern.
        device: the device of the measurement.
        stages: the stages to run.
    """

    teacher: int
    student: int
    mixer: str
    device: str
    stages: tuple[StagePlan, ...]

    @property
    def seconds(self) -> float:
        """Seconds of all stages, without validations."""
        return sum(stage.steps * stage.seconds for stage in self.stages)

    def __str__(self) -> str:
        lines = [f"teacher {self.teacher:,} parameters, student {self.student:,} parameters: {self.mixer}"]
        lines += [
            f"stage {stage.title}: {stage.tokens:,} tokens in {stage.steps:,} steps, {_time(stage.steps * stage.seconds)},"
            f" {stage.nbytes / 1e9:,.2f} GB"
            for stage in self.stages
        ]
        return "\n".join([*lines, f"in all {_time(self.seconds)} on {self.device}, without validations"])


def make_plan(teacher: Any, **options: Any) -> Plan:
    """Plan the conversion that :func:`linattn.convert` would run with the same arguments; writes nothing.

    The time is that of one step of each stage, after a warm-up step. The memory is the sum of weights, gradients, optimizer states
    and the tensors that one part of a batch saves for the backward pass.
    """
    from linattn.distill.conversion import convert_options

    return plan_of(teacher, convert_options(options))


def plan_of(teacher: Any, options: ConvertOptions) -> Plan:
    """:func:`make_plan` with its options as one object."""
    job = job_of(source_of(teacher), options)
    counts = [sum(p.numel() for p in model.parameters()) for model in (job.teacher, job.student)]
    stages = tuple(_stage(job, stage) for stage in job.stages if stage.steps)
    return Plan(counts[0], counts[1], job.student.config.mixer, str(job.device), stages)


def _stage(job: Job, stage: Stage) -> StagePlan:
    parameters = trained(job.student, stage)
    ids = job.batch(job.packed(stage), range(stage.rows))
    kept: dict[int, int] = {}

    def count(t: torch.Tensor) -> torch.Tensor:
        storage = t.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return t

    part = ids[: -(-len(ids) // job.options.accumulate)]
    with torch.autograd.graph.saved_tensors_hooks(count, lambda t: t):
        gradients(job, stage, part)
    begun = time.perf_counter()
    gradients(job, stage, ids)
    if job.device.type != "cpu":
        torch.accelerator.synchronize()
    seconds = time.perf_counter() - begun
    for p in parameters:
        p.grad = None
    weights = {p.untyped_storage().data_ptr(): p.nbytes for model in (job.teacher, job.student) for p in model.parameters()}
    nbytes = sum({**kept, **weights}.values()) + _STATE * sum(p.nbytes for p in parameters)
    return StagePlan(f"{stage.number}, {TITLES[stage.number]}", stage.steps, stage.tokens, seconds, nbytes)


def _time(seconds: float) -> str:
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s"
