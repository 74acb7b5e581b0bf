"""Folder of a conversion.

* convert.json: the options, and the values that a resumed conversion must share
* log.jsonl: one line per validation
* ranking.json: KL with each layer restored, if softmax layers are chosen by KL
* checkpoint-N/: student, optimizer, generators; complete.json is written last. Only the newest is kept, none beside a result
* config.json, tokenizer, model.safetensors: the result, written in this order; result.json is last
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, cast

import torch

import linattn
from linattn import models
from linattn.data.folders import publish
from linattn.distill.job import Job
from linattn.distill.options import ConvertOptions, ConvertResult
from linattn.distill.step import saved
from linattn.distill.student import config_with, new_student
from linattn.hf import LinattnForCausalLM
from linattn.hf import folder as folders
from linattn.hf.tokenizer import tokenizer_of
from linattn.models.files import WEIGHTS
from linattn.state import content_of, empty, read_json, replacing
from linattn.state.identity import identity
from linattn.train import checkpoint

CONVERT, LOG, RANKING, RESULT = "convert.json", "log.jsonl", "ranking.json", "result.json"
STUDENT, OPTIMIZER, GENERATORS = "student.safetensors", "optimizer.safetensors", "generators.safetensors"
_FREE = ("out", "resume", "device", "text", "tokenizer", "save_every", "start")  # options that change no weight, or are covered by a digest


def same_of(job: Job) -> dict[str, Any]:
    """Collect everything that determines the weights, as JSON values."""
    options = {f.name: getattr(job.options, f.name) for f in fields(ConvertOptions) if f.name not in _FREE}
    stated = {
        "teacher": identity(job.source.model),
        "start": job.start,
        "processes": job.group.count,
        "layers": job.layers,
        "corpus_sha256": job.data.sha256,
        **options,
    }
    return json.loads(json.dumps(stated))


def prepare(folder: Path, options: ConvertOptions, same: dict[str, Any]) -> None:
    """Write the options of a new conversion to ``folder``, or check those of the one to resume.

    Raises:
        ValueError: if the folder holds other files, a conversion while ``resume`` is not set, or a different conversion.
    """
    path = folder / CONVERT
    if not path.is_file():
        if not empty(folder):
            raise ValueError(f"{folder} already exists and is not a conversion: choose another folder with --out")
        asked = {**asdict(options), "out": None, "resume": False, "text": [os.path.abspath(p) for p in options.text]}
        for name in ("tokenizer", "start"):
            asked[name] = asked[name] and os.path.abspath(asked[name])
        write_json(path, {"linattn": linattn.__version__, "options": asked, "same": same})
        return
    known = read_json(path)
    if not options.resume:
        raise ValueError(f"{folder} already holds a conversion: continue it with --resume, or choose another folder with --out")
    with content_of(path):
        before = {"processes": 1, **known["same"]}
        other = [name for name, value in same.items() if before.get(name) != value]
    if other:
        raise ValueError(f"{folder} holds a conversion with other options: {', '.join(other)} differ")


def saved_options(folder: Path) -> ConvertOptions | None:
    """Read the options that the conversion in ``folder`` was started with; None if there is none."""
    if not (folder / CONVERT).is_file():
        return None
    known = read_json(folder / CONVERT)
    with content_of(folder / CONVERT):
        given = known["options"]
        kept = given["keep_layers"]
        start = given.get("start")
        paths = {"text": tuple(given["text"]), "start": None if start is None else Path(start)}
        options = ConvertOptions(**{**given, **paths, "keep_layers": None if kept is None else tuple(kept)})
    return replace(options, out=folder)


def save(folder: Path, job: Job, optimizer: torch.optim.Optimizer, about: dict[str, Any]) -> None:
    """Write a checkpoint after ``about["step"]`` steps, then remove older ones."""
    name = f"checkpoint-{about['step']}"
    aside = folder / f".{name}.part"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    checkpoint.write(aside / STUDENT, job.student.state_dict(), {"layers": job.layers})
    checkpoint.write(aside / OPTIMIZER, *checkpoint.flatten(saved(optimizer)))
    checkpoint.write(aside / GENERATORS, *checkpoint.generators())
    publish(aside, folder / name)
    checkpoint.mark(folder / name, **about)
    for old in folder.glob("checkpoint-*"):
        if old.name != name:
            shutil.rmtree(old)


def restore(folder: Path, job: Job) -> dict[str, Any]:
    """Load the student of the newest complete checkpoint into ``job``; returns the checkpoint's record, with step 0 if there is none."""
    newest = checkpoint.newest(folder)
    for left in folder.glob(".*.part") if job.group.first else ():
        shutil.rmtree(left) if left.is_dir() else left.unlink()
    if newest is None:
        return {"step": 0, "seconds": 0.0, "history": [], "losses": []}
    checkpoint.check(newest)
    weights, about = checkpoint.read(newest / STUDENT)
    job.layers = [(name, options) for name, options in about["layers"]]
    like = job.student.model.embedding.weight
    config = config_with(cast(models.LMConfig, job.teacher.config), job.layers)
    job.student = new_student(config, like)
    job.student.load_state_dict(weights)
    checkpoint.set_generators(*checkpoint.read(newest / GENERATORS))
    return {"folder": newest, **(checkpoint.marked(newest) or {})}


def finish(folder: Path, student: LinattnForCausalLM, job: Job, result: ConvertResult) -> None:
    """Write the result to ``folder``, with the weights after the other files of the model, and remove the checkpoints."""
    aside = folder / ".result.part"
    shutil.rmtree(aside, ignore_errors=True)
    if isinstance(job.source.model, LinattnForCausalLM):
        student.generation_config = job.source.model.generation_config
    student.save_pretrained(aside)
    own = None if job.options.tokenizer else job.source.tokenizers
    copied = {} if own is None else folders.tokenizer_of(own)
    for name, path in copied.items():
        shutil.copyfile(path, aside / name)
    if not copied:
        tokenizer_of(job.data.codec).save_pretrained(aside)
    for name in sorted((path.name for path in aside.iterdir()), key=lambda name: (name == WEIGHTS, name)):
        with replacing(folder / name) as beside:
            shutil.copyfile(aside / name, beside)
    write_json(folder / RESULT, {**asdict(result), "folder": None})
    for left in (aside, *folder.glob("checkpoint-*")):
        shutil.rmtree(left)


def finished(folder: Path) -> ConvertResult | None:
    """Read the result of the conversion in ``folder``; None if it is not finished."""
    if not (folder / RESULT).is_file():
        return None
    content = read_json(folder / RESULT)
    with content_of(folder / RESULT):
        return ConvertResult(**{**content, "folder": folder, "kept": tuple(content["kept"])})


def write_json(path: Path, content: Any) -> None:
    """Write ``content`` as JSON, atomically."""
    with replacing(path) as aside:
        aside.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def write_log(folder: Path, history: list[dict[str, Any]]) -> None:
    """Write the log, one line of JSON per validation."""
    with replacing(folder / LOG) as aside:
        aside.write_text("".join(json.dumps(record) + "\n" for record in history), encoding="utf-8")
