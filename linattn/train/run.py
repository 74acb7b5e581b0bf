"""Folder of a training run: its options, its checkpoints and the model of the newest one.

* run.json: options, config and SHA-256 of the corpus, which a resumed run must share
* config.json, model.safetensors, tokenizer.json and other files that transformers reads: links to the newest checkpoint's
* metrics.jsonl: one line per validation
* checkpoint-N/: model.safetensors, config.json, optimizer (one file, or one of each process that had a shard), schedule, generators;
  complete.json is written last
"""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open

import linattn
from linattn.arguments import absent, known_device, typed
from linattn.data.codec import Codec, codec_of
from linattn.models import LanguageModel, LMConfig
from linattn.models.files import read_weights
from linattn.models.memory import require
from linattn.state import content_of, empty, read_json, replacing
from linattn.train import checkpoint
from linattn.train.options import TrainOptions
from linattn.train.published import is_published, load_published

RUN, METRICS = "run.json", "metrics.jsonl"
OPTIMIZER, SCHEDULE, GENERATORS = "optimizer.safetensors", "schedule.safetensors", "generators-{}.safetensors"
_OF_TRAINING = re.compile(r"optimizer[.-]|schedule\.|generators-|trainer_state\.|complete\.")  # files that readers of the model do not need
# Options that determine the weights, beside config, corpus and the sequences of a step. A resumed run may raise steps.
_SAME = (
    "steps", "seed", "context", "dtype", "compile", "optimizer", "learning_rate", "schedule", "warmup",
    "weight_decay", "max_grad_norm", "z_loss", "loss_chunk", "join_documents",
)  # fmt: skip


def identity(options: TrainOptions, config: LMConfig, corpus_sha256: str, samples: int) -> dict[str, Any]:
    """Collect everything that determines the weights up to rounding, as JSON values; ``samples`` are the sequences of a step."""
    model = {f.name: getattr(config, f.name) for f in fields(LMConfig)}
    same = {**model, **{name: getattr(options, name) for name in _SAME}, "corpus_sha256": corpus_sha256, "samples": samples}
    return json.loads(json.dumps(same))


def prepare(options: TrainOptions, same: dict[str, Any], config_json: str) -> None:
    """Write the run's options and config to its folder, for a new run or one that is extended; raises as :func:`check`."""
    begun = check(options, same)
    known = _known(options.folder) if begun else None
    if known is None or known["same"]["steps"] < options.steps:
        folder = options.folder
        asked = {**asdict(options), "out": None, "resume": False, "text": [os.path.abspath(p) for p in options.text or ()]}
        asked |= {name: os.path.abspath(path) for name in ("tokenizer", "data") if (path := getattr(options, name)) is not None}
        _write(folder / "config.json", config_json)
        _write(folder / RUN, json.dumps({"linattn": linattn.__version__, "options": asked, "same": same}, indent=1))


def check(options: TrainOptions, same: dict[str, Any]) -> bool:
    """True if the folder holds the run to continue, False if it is free for a new one; writes nothing.

    Raises:
        ValueError: if the folder holds files and ``resume`` is not set, or holds a different run.
    """
    folder = options.folder
    known = _known(folder)
    if known is None:
        if folder.exists() and (not folder.is_dir() or (not options.resume and not empty(folder))):
            raise ValueError(f"{folder} already exists and is not a run: choose another folder with --out")
        return False
    if not options.resume:
        raise ValueError(f"{folder} already holds a run: continue it with --resume, or choose another folder with --out")
    there = {"join_documents": False, **known["same"]}  # runs from before the option existed
    if isinstance(there.get("steps"), int) and there["steps"] < options.steps:  # extended
        there = {**there, "steps": options.steps}
    other = [f"{k} {there.get(k)!r} there, {v!r} here" for k, v in same.items() if there.get(k) != v]
    if other:
        raise ValueError(f"{folder} holds a run with other options: {'; '.join(other)}")
    return True


def saved_samples(folder: Path) -> int | None:
    """Sequences of a step of the run in ``folder``, or None where there is no run."""
    known = _known(folder)
    return None if known is None else known["same"].get("samples")


def saved_options(folder: Path) -> TrainOptions | None:
    """Read the options that the run in ``folder`` was started with; None if there is no run."""
    known = _known(folder)
    if known is None:
        return None
    with content_of(folder / RUN):
        lists = {"text": tuple(known["options"]["text"]), "report_to": tuple(known["options"].get("report_to", ()))}
        data = known["options"].get("data")
        options = TrainOptions(**{**known["options"], **lists, "data": data and Path(data)})
    return replace(options, out=folder)


def history(folder: Path, step: int) -> list[dict[str, Any]]:
    """Read the validations up to ``step``; a killed run repeats later ones.

    Raises:
        ValueError: for a damaged line. An incomplete last line is skipped, since a run can be killed while it writes.
    """
    path = folder / METRICS
    try:
        lines = path.read_text().splitlines()
    except FileNotFoundError:
        return []
    records = []
    with content_of(path):
        for i, line in enumerate(lines):
            try:
                record = json.loads(line)
            except ValueError:
                if i + 1 < len(lines):
                    raise
                continue
            if not all(isinstance(record[name], int | float) for name in ("step", "tokens", "seconds", "validation_bits_per_byte")):
                raise ValueError(f"line {i + 1} has no numbers")
            records.append(record)
    return [record for record in records if record["step"] <= step]


def clean(folder: Path, records: list[dict[str, Any]]) -> None:
    """Delete incomplete files of a killed process, and all metrics but ``records``."""
    for left in folder.glob(".*.part"):
        shutil.rmtree(left) if left.is_dir() else left.unlink()
    _write(folder / METRICS, "".join(json.dumps(record) + "\n" for record in records))


def present(folder: Path) -> None:
    """Link the model and tokenizer of the newest checkpoint into ``folder`` itself, where readers of models look for them."""
    newest = checkpoint.newest(folder)
    for file in () if newest is None else newest.iterdir():
        if not _OF_TRAINING.match(file.name) and not _same(file, folder / file.name):
            with replacing(folder / file.name) as aside:
                _link(file, aside)


def _same(one: Path, other: Path) -> bool:
    return other.exists() and one.samefile(other)


def _link(file: Path, to: Path) -> None:
    try:
        os.link(file, to)
    except OSError:  # the file system has no links
        shutil.copyfile(file, to)


@typed
def load_run(path: str | os.PathLike[str], *, device: str | torch.device = "cpu") -> tuple[LanguageModel, Codec]:
    """Load the model of a run with its codec, which turns text into tokens and back, without transformers.

    Folders of published models and GGUF files are loaded through :func:`linattn.load`, which needs transformers.

    Args:
        path: a run's folder (its newest complete checkpoint is loaded), one checkpoint, or a published model.
        device: device of the model.

    Raises:
        OSError: if there is no run.
        ValueError: if it is damaged.
    """
    known_device("device", device)
    path = Path(path)
    if is_published(path):
        return cast("tuple[LanguageModel, Codec]", load_published(path, device))
    alone = (path / "model.safetensors").is_file() and not (path / RUN).is_file()
    folder = path if alone else checkpoint.newest(path)
    if folder is None:
        kind = "holds no complete checkpoint" if _known(path) else "is neither a run of linattn train nor one of its checkpoints"
        raise FileNotFoundError(f"{path} {kind}" if path.exists() else absent(path))
    checkpoint.check(folder)
    content = read_json(folder / "config.json")
    if content.get("model_type") != "linattn":
        raise ValueError(f"{folder / 'config.json'} is not the config of a linattn model")
    with content_of(folder / "config.json"):
        config = LMConfig(**{f.name: content[f.name] for f in fields(LMConfig) if f.name in content})
    model = _load(folder / "model.safetensors", config).to(device).eval()
    return model, codec_of(folder, config.vocab_size)


def _load(path: Path, config: LMConfig) -> LanguageModel:
    if config.layers > (tensors := _tensors(path)):  # before memory is allocated for them
        raise ValueError(f"{path} does not fit its config: it has {tensors} tensors, but config.json has layers = {config.layers:,}")
    require(path.stat().st_size, f"the weights in {path}")
    return read_weights(path, lambda: LanguageModel(config), frozenset({"lm_head.weight"} if config.tie_embeddings else ()))


def _tensors(path: Path) -> int:
    """Count the tensors of a safetensors file."""
    try:
        with safe_open(path, framework="pt") as file:
            return len(list(file.keys()))
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged: {error}") from None


def _known(folder: Path) -> dict[str, Any] | None:
    """Read run.json; None if there is none."""
    path = folder / RUN
    if not path.is_file():
        return None
    known = read_json(path)
    with content_of(path):
        if not (isinstance(known["options"], dict) and isinstance(known["same"], dict)):
            raise ValueError("options and same must be objects")
    return known


def _write(path: Path, text: str) -> None:
    with replacing(path) as aside:
        aside.write_text(text)
