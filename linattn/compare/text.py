"""The comparison: size, train, measure, write."""

from __future__ import annotations

import math
import shutil
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from linattn import mixers
from linattn.compare.measure import at_context, expected_seconds
from linattn.compare.options import CompareOptions
from linattn.compare.text_page import page
from linattn.data import corpus
from linattn.data.corpus import Corpus
from linattn.data.packed import PackedTokens, Windows
from linattn.experiment.sizing import Size, equal_sizes, parameters
from linattn.experiment.study import LeftOut
from linattn.generate import stream
from linattn.mixers.parts import ShortConvolution
from linattn.models import LanguageModel, LMConfig
from linattn.models.memory import require_training
from linattn.report.folder import SCHEMA, VERSION, Folder, write_text
from linattn.report.machine import machine
from linattn.report.progress import Progress
from linattn.train import TrainOptions, TrainResult, load_run, train

TEMPERATURE = 0.7  # of the sample continuations
PROMPT = 48  # characters of the prompt
EVALUATIONS = 10  # of each model while it learns


@dataclass(frozen=True)
class Trained:
    """A model of the comparison, ready to be measured, and its part of the report."""

    model: LanguageModel
    row: dict


def run(options: CompareOptions, *, progress: bool) -> dict:
    """Compare on text; see :func:`linattn.report.compare`."""
    folder = Folder(options.out)
    text = corpus(options.text)
    PackedTokens(text.train, options.train_context, samples=1)  # both refuse a text that is too short
    Windows(text.validation, options.train_context, 1)
    for name in options.mixers:
        tokens = options.batch_size * options.train_context
        require_training(_config(options, name, text.vocab_size, None), tokens=tokens, chunk=tokens)
    sizes = _sizes(options, text.vocab_size)
    report = _head(options, text)
    bar, models = Progress(progress), {}
    with folder.held():
        folder.begin(report)
        for turn, (name, size) in enumerate(sizes.items(), 1):
            bar.say(f"training {name} ({turn} of {len(sizes)}): {size.parameters:,} parameters, feed-forward width {size.ffn_dim:,}")
            models[name] = _train(options, name, size, bars=bar.bars)
            report["mixers"].append(models[name].row)
            folder.save(report)
        _measure(options, models, text, bar)
        report["key_value_cache"] = _caches(options)
        _sample(options, models, text, report)
        report["complete"] = True
        write_text(folder.html, page(report))
        folder.save(report)
    return report


def _head(options: CompareOptions, text: Corpus) -> dict:
    """The report before anything is measured."""
    asked = asdict(options)
    asked["out"] = str(options.out)
    return {
        "schema": SCHEMA,
        "version": VERSION,
        "complete": False,
        "command": options.command(),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "options": asked,
        "corpus": {"name": _text_name(options), "sha256": text.sha256, "vocab_size": text.vocab_size},
        "prompt": "",
        "mixers": [],
        "key_value_cache": [],
    }


def _text_name(options: CompareOptions) -> str:
    if not options.text:
        return "the source of Python's standard library"
    first = Path(options.text[0]).name
    return first if len(options.text) == 1 else f"{first} and {len(options.text) - 1} more"


def _config(options: CompareOptions, name: str, vocab_size: int, ffn_dim: int | None) -> LMConfig:
    return LMConfig(vocab_size=vocab_size, dim=options.dim, layers=options.layers, mixer=name, ffn_dim=ffn_dim)


def _sizes(options: CompareOptions, vocab_size: int) -> dict[str, Size]:
    """Feed-forward widths for equal parameters, from models that are built without memory."""

    def count(name: str, ffn_dim: int | None) -> int:
        return parameters(lambda: LanguageModel(_config(options, name, vocab_size, ffn_dim)))

    return equal_sizes(options.mixers, count(options.mixers[0], None), count)


def _train(options: CompareOptions, name: str, size: Size, *, bars: bool) -> Trained:
    """Train ``name`` at every learning rate, and keep the run that validates best."""
    out = Folder(options.out).models / name
    places = {rate: out if len(options.learning_rate) == 1 else out.with_name(f"{name}-{rate:g}") for rate in options.learning_rate}
    results = {rate: _run(options, name, size, rate, place, bars=bars) for rate, place in places.items()}
    found = {rate: result for rate, result in results.items() if math.isfinite(result.validation_bits_per_byte)}
    if not found:
        loss = next(iter(results.values())).validation_bits_per_byte
        raise ValueError(f"the training of {name} diverged: its loss is {loss}; compare without it")
    best = min(found, key=lambda rate: found[rate].validation_bits_per_byte)
    result = found[best]
    if places[best] != out:
        places[best].rename(out)
        for place in places.values():
            shutil.rmtree(place, ignore_errors=True)
    known = mixers.info(name)
    model, _ = load_run(out)
    training = {
        "history": [{k: v if v is None or math.isfinite(v) else None for k, v in h.items()} for h in result.history],
        "validation_bits_per_byte": result.validation_bits_per_byte,
        "learning_rate": best,
        "tried": [{"learning_rate": rate, "validation_bits_per_byte": r.validation_bits_per_byte} for rate, r in found.items()],
        "tokens_per_second": result.tokens_per_second,
        "seconds": result.history[-1]["seconds"],
    }
    row: dict[str, Any] = {
        "name": name, "title": known.title, "arxiv": known.arxiv, "ffn_dim": size.ffn_dim, "parameters": result.parameters,
        "conv_width": _convolution(model), "model": f"models/{name}", "training": training, "contexts": [], "left_out": [], "sample": "",
    }  # fmt: skip
    return Trained(model, row)


def _run(options: CompareOptions, name: str, size: Size, rate: float, out: Path, *, bars: bool) -> TrainResult:
    """Train ``name`` at the learning rate ``rate`` in the folder ``out``."""
    return train(
        TrainOptions(
            mixer=name, text=options.text, steps=options.steps, dim=options.dim, layers=options.layers, ffn_dim=size.ffn_dim,
            context=options.train_context, batch_size=options.batch_size, learning_rate=rate, seed=options.seed,
            eval_every=-(-options.steps // EVALUATIONS), dtype="fp32", out=out,
        ),
        progress=bars,
    )  # fmt: skip


def _convolution(model: LanguageModel) -> int:
    """Width of the mixers' short convolution, 0 for none."""
    return max((part.width for part in model.modules() if isinstance(part, ShortConvolution)), default=0)


def _measure(options: CompareOptions, models: dict[str, Trained], text: Corpus, bar: Progress) -> None:
    """Fill in ``contexts`` and ``left_out``; the mixers take turns at each context, so that a busy moment hits all alike."""
    turns = [(context, name) for context in sorted(set(options.contexts)) for name in models]
    for context, name in bar.measurements(turns):
        row = models[name].row
        try:
            expected = expected_seconds(row["contexts"], context)
            if expected > options.patience:
                raise LeftOut(f"expected to take up to {expected:.0f} s, and {options.patience:g} s are the most for one measurement")
            row["contexts"].append(at_context(models[name].model, _some(text.validation, context)[None]))
        except LeftOut as reason:
            row["left_out"].append({"context": context, "reason": str(reason)})


def _sample(options: CompareOptions, models: dict[str, Trained], text: Corpus, report: dict) -> None:
    """The same prompt continued by each, with one seed."""
    report["prompt"] = _prompt(text)
    prompt = text.encode(report["prompt"])
    for trained in models.values():
        generator = torch.Generator().manual_seed(options.seed)
        written = stream(trained.model, prompt, max_new_tokens=options.sample_tokens, temperature=TEMPERATURE, generator=generator)
        trained.row["sample"] = text.decode(list(written))


def _prompt(text: Corpus) -> str:
    """The beginning of the first whole paragraph of the validation text, or of its first whole line, or of it all."""
    start = text.decode(text.validation[:4096].tolist())
    for border in ("\n\n", "\n"):
        _, found, paragraph = start.partition(border)
        if found and paragraph.strip():
            return paragraph.lstrip()[:PROMPT]
    return start[:PROMPT]


def _caches(options: CompareOptions) -> list[dict]:
    """The bytes of a key-value cache of these layers in float32, at each context."""
    lengths = sorted(set(options.contexts))
    layer = [mixers.cost("softmax", dim=options.dim, tokens=c, dtype=torch.float32).softmax_cache_bytes for c in lengths]
    return [{"context": c, "bytes": b * options.layers} for c, b in zip(lengths, layer, strict=True)]


def _some(tokens: np.ndarray, count: int) -> Tensor:
    """The first ``count`` of ``tokens`` [n], from the beginning again where they end: [count] int64."""
    return torch.from_numpy(tokens[np.arange(count) % len(tokens)].astype(np.int64))
