"""The comparison: size, train, measure, write."""

from __future__ import annotations

import math
import shutil
import statistics
from collections.abc import Iterator
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
from linattn.compare.parts import parts
from linattn.compare.rates import best, chosen, sweep, swept, tried
from linattn.compare.text_page import page
from linattn.data import corpus
from linattn.data.corpus import Corpus
from linattn.data.packed import PackedTokens, Windows
from linattn.experiment.sizing import Size, equal_sizes, parameters
from linattn.experiment.study import LeftOut, mean_and_spread
from linattn.generate import stream
from linattn.models import LanguageModel, LMConfig
from linattn.models.memory import require_training
from linattn.report.folder import SCHEMA, VERSION, Folder, write_text
from linattn.report.machine import machine
from linattn.report.progress import Progress
from linattn.reproduce.variants import parse
from linattn.train import TrainOptions, TrainResult, load_run, train

TEMPERATURE = 0.7  # temperature of the sample continuations
PROMPT, PROMPTS = 48, 8  # characters of a prompt, and number of candidates
TEXT = 0.5  # minimum share of visible characters of a continuation
EVALUATIONS = 10  # evaluations during the training of each model


@dataclass(frozen=True)
class Trained:
    """The first seed's model of a mixer, ready to be measured, and the mixer's part of the report."""

    model: LanguageModel
    row: dict


@dataclass(frozen=True)
class Trial:
    """A finished training of one model."""

    rate: float
    seed: int
    folder: Path
    result: TrainResult

    @property
    def row(self) -> dict[str, Any]:
        """The trial's part of the report."""
        r = self.result
        return {
            "learning_rate": self.rate, "seed": self.seed, "validation_bits_per_byte": r.validation_bits_per_byte,
            "tokens_per_second": r.tokens_per_second, "seconds": r.history[-1]["seconds"],
        }  # fmt: skip


def run(options: CompareOptions, *, progress: bool) -> dict:
    """Compare on text; see :func:`linattn.report.compare`."""
    folder = Folder(options.out)
    text = corpus(options.text)
    PackedTokens(text.train, options.train_context, samples=1)  # both raise for a text that is too short
    Windows(text.validation, options.train_context, 1)
    for name in options.mixers:
        tokens = options.batch_size * options.train_context
        require_training(_config(options, name, text.vocab_size, None), tokens=tokens, chunk=tokens)
    widths = sizes(options, text.vocab_size)
    report = _head(options, text)
    bar, models = Progress(progress), {}
    with folder.held():
        folder.begin(report)
        for turn, (name, size) in enumerate(widths.items(), 1):
            bar.say(f"training {name} ({turn} of {len(widths)}): {size.parameters:,} parameters, feed-forward width {size.ffn_dim:,}")
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
    """Report without measurements."""
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
        "sweep": sweep() if any(not rates and swept(mixer) for mixer, rates in options.rates().items()) else None,
    }


def _text_name(options: CompareOptions) -> str:
    if not options.text:
        return "the source of Python's standard library"
    first = Path(options.text[0]).name
    return first if len(options.text) == 1 else f"{first} and {len(options.text) - 1} more"


def _config(options: CompareOptions, mixer: str, vocab_size: int, ffn_dim: int | None) -> LMConfig:
    variant = parse(mixer)
    return LMConfig(
        vocab_size=vocab_size, dim=options.dim, layers=options.layers, mixer=variant.name, mixer_options=variant.mixer_options,
        ffn_dim=ffn_dim,
    )  # fmt: skip


def sizes(options: CompareOptions, vocab_size: int) -> dict[str, Size]:
    """Feed-forward widths for equal parameters, from models on the meta device."""

    def count(name: str, ffn_dim: int | None) -> int:
        return parameters(lambda: LanguageModel(_config(options, name, vocab_size, ffn_dim)))

    return equal_sizes(options.mixers, count(options.mixers[0], None), count)


def _train(options: CompareOptions, mixer: str, size: Size, *, bars: bool) -> Trained:
    """Train ``mixer`` with every seed at each of its learning rates, and keep the models of the rate that validates best."""
    rates, out = options.rates()[mixer], Folder(options.out).models
    done = [
        _trial(options, mixer, size, rate, seed, out, bars=bars)
        for rate in rates or [chosen(mixer)]
        for seed in range(options.seed, options.seed + options.seeds)
    ]
    diverged = {one.rate: one for one in done if not math.isfinite(one.result.validation_bits_per_byte)}
    sound = [one for one in done if one.rate not in diverged]
    if not sound:
        loss = next(iter(diverged.values())).result.validation_bits_per_byte
        raise ValueError(f"the training of {mixer} diverged: its loss is {loss}; compare without it")
    figures = tried([one.row for one in sound])
    kept = [one for one in sound if one.rate == best(figures)]
    for one in done:
        if one in kept:
            one.folder.rename(out / _folder_name(mixer, one.seed, options.seed))
        else:
            shutil.rmtree(one.folder)
    known, place = mixers.info(parse(mixer).name), _folder_name(mixer, options.seed, options.seed)
    model, _ = load_run(out / place)
    training = {
        "history": list(_mean_history([one.result.history for one in kept])),
        **mean_and_spread("validation_bits_per_byte", [one.result.validation_bits_per_byte for one in kept]),
        "learning_rate": kept[0].rate,
        "learning_rate_from": "tried" if len(rates) > 1 else "given" if rates else "sweep" if swept(mixer) else "default",
        "tried": figures,
        "swept": swept(mixer),
        "runs": [one.row for one in kept],
        "tokens_per_second": statistics.fmean(one.row["tokens_per_second"] for one in kept),
        "seconds": statistics.fmean(one.row["seconds"] for one in kept),
    }
    row: dict[str, Any] = {
        "name": mixer, "title": known.title, "arxiv": known.arxiv, "ffn_dim": size.ffn_dim, "parameters": kept[0].result.parameters,
        "parts": parts(model.model.layers[0].mixer, options.dim), "model": f"models/{place}", "training": training, "contexts": [],
        "left_out": [], "sample": "",
    }  # fmt: skip
    return Trained(model, row)


def _trial(options: CompareOptions, mixer: str, size: Size, rate: float, seed: int, out: Path, *, bars: bool) -> Trial:
    """Train one model in a folder of its own in ``out``."""
    folder = out / f"{_folder_name(mixer, seed)}-{rate:g}"
    return Trial(rate, seed, folder, train(train_options(options, mixer, size.ffn_dim, rate, seed, folder), progress=bars))


def _folder_name(mixer: str, seed: int, first: int | None = None) -> str:
    """Name of a model's folder; for the ``first`` seed it is the mixer's name."""
    name = "".join(c if c.isalnum() or c in "_." else "-" for c in mixer)
    return name if seed == first else f"{name}-seed-{seed}"


def _mean_history(histories: list[list[dict]]) -> Iterator[dict[str, float | None]]:
    """The mean of the histories at each evaluation; None for a value that is not finite in one of them."""
    for entries in zip(*histories, strict=True):
        yield {key: _mean([entry[key] for entry in entries]) for key in entries[0]}


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None and math.isfinite(value)]
    if len(known) < len(values):
        return None
    return known[0] if len(set(known)) == 1 else statistics.fmean(known)  # steps stay integers


def train_options(options: CompareOptions, mixer: str, ffn_dim: int, rate: float, seed: int, out: Path) -> TrainOptions:
    """Options for training ``mixer``, whose feed-forward is ``ffn_dim`` wide, at the learning rate ``rate`` in the folder ``out``."""
    variant = parse(mixer)
    return TrainOptions(
        mixer=variant.name, mixer_options=variant.mixer_options, text=options.text, steps=options.steps, dim=options.dim,
        layers=options.layers, ffn_dim=ffn_dim, context=options.train_context, batch_size=options.batch_size, learning_rate=rate,
        seed=seed, eval_every=-(-options.steps // EVALUATIONS), dtype="fp32", out=out,
    )  # fmt: skip


def _measure(options: CompareOptions, models: dict[str, Trained], text: Corpus, bar: Progress) -> None:
    """Fill in ``contexts`` and ``left_out``; mixers alternate at each context, so that other load affects all."""
    turns = [(context, name) for context in sorted(set(options.contexts)) for name in models]
    for context, name in bar.measurements(turns):
        row = models[name].row
        try:
            expected = expected_seconds(row["contexts"], context)
            if expected > options.patience:
                raise LeftOut(f"expected to take up to {expected:.0f} s, above the limit of {options.patience:g} s for one measurement")
            row["contexts"].append(at_context(models[name].model, _some(text.validation, context)[None]))
        except LeftOut as reason:
            row["left_out"].append({"context": context, "reason": str(reason)})


def _sample(options: CompareOptions, models: dict[str, Trained], text: Corpus, report: dict) -> None:
    """Continue one prompt with each model and one seed: the first prompt that every model continues with text.

    If there is none, the prompt whose worst continuation has the most visible characters.
    """
    found: list[tuple[float, str, list[str]]] = []
    for prompt in _prompts(text):
        samples = [_continued(options, trained.model, text, prompt) for trained in models.values()]
        found.append((min(map(_visible, samples)), prompt, samples))
        if found[-1][0] >= TEXT:
            break
    _, report["prompt"], samples = max(found, key=lambda one: one[0])
    report["prompts_tried"] = len(found)
    for trained, sample in zip(models.values(), samples, strict=True):
        trained.row["sample"] = sample


def _continued(options: CompareOptions, model: LanguageModel, text: Corpus, prompt: str) -> str:
    generator = torch.Generator().manual_seed(options.seed)
    written = stream(model, text.encode(prompt), max_new_tokens=options.sample_tokens, temperature=TEMPERATURE, generator=generator)
    return text.decode(list(written))


def _visible(sample: str) -> float:
    """Share of the characters of ``sample`` that are visible."""
    return sum(not c.isspace() for c in sample) / max(1, len(sample))


def _prompts(text: Corpus) -> list[str]:
    """Beginnings of the first whole paragraphs of the validation text, or else of its first whole line, or of the text."""
    start = text.decode(text.validation[:4096].tolist())
    for border in ("\n\n", "\n"):
        _, found, rest = start.partition(border)
        if found and rest.strip():
            paragraphs = [p.strip()[:PROMPT].rstrip() for p in rest.split("\n\n") if p.strip()]
            return paragraphs[:PROMPTS]
    return [start[:PROMPT]]


def _caches(options: CompareOptions) -> list[dict]:
    """The bytes of a key-value cache of these layers in float32, at each context."""
    lengths = sorted(set(options.contexts))
    layer = [mixers.cost("softmax", dim=options.dim, tokens=c, dtype=torch.float32).softmax_cache_bytes for c in lengths]
    return [{"context": c, "bytes": b * options.layers} for c, b in zip(lengths, layer, strict=True)]


def _some(tokens: np.ndarray, count: int) -> Tensor:
    """The first ``count`` of ``tokens`` [n], repeated cyclically: [count] int64."""
    return torch.from_numpy(tokens[np.arange(count) % len(tokens)].astype(np.int64))
