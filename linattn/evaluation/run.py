"""Execution of an evaluation: each model in turn, then the report."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from linattn.arguments import absent, known_device
from linattn.evaluation import harness, measure
from linattn.evaluation.options import EvaluateOptions
from linattn.evaluation.page import page
from linattn.models.quantised import parameter_count
from linattn.report.folder import Folder, write_text
from linattn.report.machine import machine
from linattn.report.progress import Progress
from linattn.train.run import load_run

SCHEMA, VERSION = "linattn.evaluation", 1


def evaluate(models: Sequence[str | Path], options: EvaluateOptions | None = None, *, progress: bool = False) -> dict[str, Any]:
    """Measure language models side by side.

    Args:
        models: runs of ``linattn train``, folders that :func:`linattn.load` reads with their ``tokenizer.json``, or GGUF files.
        options: measurements to make; a teacher is measured first.
        progress: show progress on stderr.

    Returns:
        The content of report.json: ``models``, each with its ``name``, ``mixer``, ``parameters``, ``bits_per_byte``, ``kl`` and ``top1``
        (with a teacher), ``tasks``, ``lm_eval`` and ``decoding``.

    Raises:
        OSError, ValueError: for an unreadable model, and for one with other tokens than the teacher.
        ModuleNotFoundError: for ``options.lm_eval`` where lm-eval is not installed.
    """
    options = options or EvaluateOptions()
    if isinstance(models, str | Path) or not models:
        raise ValueError(f"models must be a list of at least one folder, but came as {models!r}")
    if options.lm_eval:
        harness.require()
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    known_device("device", device)
    folder = None if options.out is None else Folder(options.out, SCHEMA)
    wanted = [Path(path) for path in ([] if options.teacher is None else [options.teacher]) + list(models)]
    for path in wanted:  # all, before minutes of measurements of the first
        if not path.exists():
            raise FileNotFoundError(absent(path))
    teacher = None if options.teacher is None else _loaded(options.teacher, options, device)
    report: dict[str, Any] = {
        "schema": SCHEMA, "version": VERSION, "created": datetime.now(UTC).isoformat(timespec="seconds"), "machine": machine(),
        "options": {name: str(value) if isinstance(value, Path) else value for name, value in asdict(options).items() if name != "out"},
        "device": device, "models": [],
    }  # fmt: skip
    report["options"]["text"] = [str(path) for path in options.text]
    bar = Progress(progress)
    with folder.held() if folder is not None else nullcontext(), bar.counted("evaluating", len(wanted)) as done:
        for i, path in enumerate(wanted):
            given = teacher if teacher is not None and i == 0 else _loaded(path, options, device)
            report["models"].append(_measured(path, given, options, None if i == 0 else teacher))
            done(str(path))
        if folder is not None:
            folder.path.mkdir(parents=True, exist_ok=True)
            folder.save(report)
            write_text(folder.html, page(report))
    return report


def _loaded(path: str | Path, options: EvaluateOptions, device: str) -> tuple[Any, Any]:
    """Load a model and its codec in the precision of the evaluation."""
    model, codec = load_run(path, device=device)
    dtype = options.dtype or ("bf16" if device.startswith("cuda") else None)
    return model if dtype is None else model.to({"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]), codec


def _measured(path: Path, given: tuple[Any, Any], options: EvaluateOptions, teacher: tuple[Any, Any] | None) -> dict[str, Any]:
    model, codec = given
    if teacher is not None and not measure.same_tokens(codec, teacher[1]):
        raise ValueError(f"{path} must have the teacher's tokenizer, but has another")
    if teacher is not None:
        codec = teacher[1]  # the same object, so that prompts are made once
    model.eval()
    tokens, size = measure.held_out(options, codec)
    return {
        "name": str(path), "mixer": str(model.config.mixer), "parameters": parameter_count(model),
        **measure.on_text(model, tokens, size, options, None if teacher is None else teacher[0]),
        "tasks": measure.on_tasks(model, codec, options), "lm_eval": harness.on_harness(model, codec, options),
        "decoding": measure.decoding(model, tokens, options),
    }  # fmt: skip
