"""Execution of a conversion, from options to result."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from linattn.distill import files
from linattn.distill.calibrate import calibrate
from linattn.distill.job import Job, job_of, measured, source_of, teacher_bits_per_byte
from linattn.distill.keep import rank_layers, restored
from linattn.distill.options import ConvertOptions, ConvertResult
from linattn.distill.processes import started
from linattn.distill.stages import Stage, trained
from linattn.distill.step import Step, optimizer_of
from linattn.distill.student import SOFTMAX, replaced, student_layers, student_of
from linattn.report.progress import Progress
from linattn.state import only_writer
from linattn.train import checkpoint
from linattn.train.process_state import restored_process_state

Say = Callable[[str], None]


def convert(teacher: Any, *, progress: bool = True, **options: Any) -> ConvertResult:
    """Convert a softmax Transformer to other mixers and write it to a folder that :func:`linattn.load` reads.

    ``linattn.convert("smollm2", mixer="gated_deltanet*3, softmax", text=("book.txt",), out="student")`` copies
    matching weights, calibrates gates and output projections in closed form, and distils in up to three stages. A killed conversion
    continues with ``resume=True`` and ends with the same bits.

    Args:
        teacher: a folder or GGUF file that :func:`linattn.load` reads, a run of ``linattn train``, or a model; every layer must be softmax.
        progress: report every validation on stderr.
        options: the fields of :class:`linattn.distill.ConvertOptions`; ``out`` is required where the teacher is a model.

    Raises:
        TypeError: for a teacher that is not a model, and for unknown options.
        OSError, ValueError: for a teacher with other layers, for unusable text, layers and folders, and for a loss that is NaN.
    """
    return run(teacher, convert_options(options), progress=progress)


def convert_options(options: dict[str, Any]) -> ConvertOptions:
    """Build a :class:`ConvertOptions` from keywords; lists become tuples."""
    given: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}
    return ConvertOptions(**given)


def run(teacher: Any, options: ConvertOptions, *, progress: bool = True) -> ConvertResult:
    """:func:`convert` with its options as one object."""
    source = source_of(teacher)
    options = replace(options, out=folder_of(source.path, options.out))
    with restored_process_state():
        job = job_of(source, options)
        assert options.out is not None
        rows = [stage.rows for stage in job.stages if stage.steps]
        with started(job.device, rows) as job.group, only_writer(options.out) if job.group.first else nullcontext():
            if job.group.first:
                files.prepare(options.out, options, files.same_of(job))
            job.group.wait()
            result = files.finished(options.out)
            job.group.wait()
            return result or _execute(job, options.out, Progress(progress and job.group.first))


def folder_of(teacher: Path | None, out: Path | None) -> Path:
    """Folder of the result: ``out``, or the teacher's name with ``-linear``.

    Raises:
        ValueError: if both are None.
    """
    if out is not None:
        return Path(out)
    if teacher is None:
        raise ValueError("out must be a folder if the teacher is a model, but came as None")
    return Path(f"{teacher.resolve().stem if teacher.is_file() else teacher.resolve().name}-linear")


def _execute(job: Job, folder: Path, progress: Progress) -> ConvertResult:
    seen = files.restore(folder, job)
    history: list[dict[str, Any]] = seen["history"]
    _write_log(job, folder, history)
    if not seen["step"]:
        progress.say(f"copied the teacher into {job.student.config.mixer}")
        _initialise(job, history)
        _write_log(job, folder, history)
    first = 0
    for stage in job.stages:
        if stage.number == 2 and job.options.keep:
            _keep(job, folder, progress)
        if first <= seen["step"] < first + stage.steps:
            if seen["step"] > first:
                progress.say(f"continuing after step {seen['step'] - first} of stage {stage.number}")
            seen = _run(job, stage, {**seen, "first": first}, folder, progress)
        first += stage.steps
    if history[-1]["kept"] != _kept(job):  # no stage ran after the choice
        history.append({**history[-1], "stage": "keep", "kept": _kept(job), **measured(job)})
    result = ConvertResult(folder, tuple(_kept(job)), history, teacher_bits_per_byte(job))
    _write_log(job, folder, history)
    if job.group.first:
        files.finish(folder, job.student, job, result)
    return result


def _write_log(job: Job, folder: Path, history: list[dict[str, Any]]) -> None:
    if job.group.first:
        files.write_log(folder, history)


def _initialise(job: Job, history: list[dict[str, Any]]) -> None:
    """Calibrate the student; append its measurements before and after to ``history``."""
    start = {"step": 0, "tokens": 0, "seconds": 0.0, "kept": _kept(job)}
    history.append({"stage": "copy" if job.options.start is None else "start", **start, **measured(job)})
    if job.options.calibrate and job.options.tokens1 and job.options.start is None and replaced(job.student):
        calibrate(job.student, job.calibration())
        history.append({"stage": "calibrate", **start, **measured(job)})


def _kept(job: Job) -> list[int]:
    return [i for i, (name, _) in enumerate(job.layers) if name == SOFTMAX]


def _keep(job: Job, folder: Path, progress: Progress) -> None:
    """Restore the softmax layers that lower the KL most, unless a checkpoint already has them."""
    if _kept(job):
        return
    options = job.options
    full = student_layers(job.teacher, SOFTMAX, rotary=options.rotary, mixer_options={})
    softmax = student_of(job.teacher, full)
    ranking = rank_layers(job.student, softmax, lambda: measured(job, outputs=False)["kl"])
    kept = sorted(list(ranking)[: options.keep])
    if job.group.first:
        files.write_json(folder / files.RANKING, {"kept": kept, "kl": ranking})
    progress.say(f"softmax stays in layers {', '.join(map(str, kept))}")
    job.student, job.layers = restored(job.student, softmax, job.layers, full, kept)


def _run(job: Job, stage: Stage, seen: dict[str, Any], folder: Path, progress: Progress) -> dict[str, Any]:
    """Train ``stage`` from ``seen["step"]`` on; returns the record of the last checkpoint."""
    first, history = seen["first"], seen["history"]
    if stage.number == 1 and not replaced(job.student):
        return {**seen, "step": first + stage.steps}
    job.group.align(job.student)
    optimizer = optimizer_of(trained(job.student, stage), stage, job.device)
    if seen["step"] > first:
        optimizer.load_state_dict(checkpoint.unflatten(*checkpoint.read(seen["folder"] / files.OPTIMIZER)))
    every = job.options.save_every or max(10, stage.steps // 10)
    title = f"stage {stage.number}"
    parts = -(-stage.steps // every)
    with progress.counted(title, parts, (seen["step"] - first) // every) as say:
        for losses, step, seconds in _steps(job, stage, optimizer, (seen["step"] - first, every)):
            seen = {**seen, "step": first + step, "seconds": seen["seconds"] + seconds, "losses": []}
            tokens = sum(s.tokens for s in job.stages if s.number < stage.number) + step * stage.rows * stage.context
            record = {"stage": stage.number, "step": seen["step"], "tokens": tokens, "seconds": seen["seconds"], "kept": _kept(job)}
            history.append({**record, "loss": sum(losses) / len(losses), **measured(job, outputs=stage.number == 1)})
            if job.group.first:
                files.save(folder, job, optimizer, {name: seen[name] for name in ("step", "seconds", "losses", "history")})
            _write_log(job, folder, history)
            say(_summary(history[-1], len(losses) * stage.rows * stage.context / seconds))
    return seen


def _steps(job: Job, stage: Stage, optimizer: torch.optim.Optimizer, span: tuple[int, int]) -> Iterator[tuple[list[float], int, float]]:
    """Train from step ``span[0]``; every ``span[1]`` steps and at the end yield the losses since the last yield, the step, the seconds."""
    begin, every = span
    packed, run_step = job.packed(stage), Step(job, stage, optimizer)
    losses: list[torch.Tensor] = []
    since = time.perf_counter()
    job.student.train()
    for step in range(begin, stage.steps):
        losses.append(run_step(step, job.batch(packed, job.group.share(range(step * stage.rows, (step + 1) * stage.rows)))))
        if (step + 1) % every == 0 or step + 1 == stage.steps:
            values = torch.stack(losses).tolist()
            if not all(map(math.isfinite, values)):
                raise ValueError(f"the loss is NaN or infinite after step {step + 1} of stage {stage.number}: lower its learning rate")
            yield values, step + 1, time.perf_counter() - since
            losses, since = [], time.perf_counter()
            job.student.train()
    job.student.eval()


def _summary(record: dict[str, Any], speed: float) -> str:
    parts = [f"kl {record['kl']:.4g}", f"top-1 {record['top1']:.1%}", f"{record['bits_per_byte']:.3f} bits/byte"]
    return " · ".join([*parts, f"loss {record['loss']:.4g}", f"{speed:,.0f} tokens/s"])
