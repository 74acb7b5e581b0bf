"""Extrapolation: a byte language model trained on short texts reads one 32 times as long.

Every model reads the same held-out text twice: once with its state (softmax: its cache) carried from the first byte to the
last, and once with the state reset at the border of each segment, a segment being as long as a training text. The bits per
byte at a position show whether the model extrapolates to unseen lengths; the difference between the two, on the same bytes,
shows whether the state from beyond a training text helps or harms.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from linattn import mixers
from linattn.data import corpus
from linattn.experiment.sizing import Unequal
from linattn.experiment.study import Column, Done, LeftOut, Result, Row, Run, Study, grouped, mean_and_spread, share
from linattn.models import LanguageModel
from linattn.report.charts import Chart
from linattn.report.plot import Heading
from linattn.report.scales import linear, logarithmic
from linattn.report.words import tokens
from linattn.reproduce import variants
from linattn.reproduce.charts import Measure, curves
from linattn.reproduce.training import Stack, on_text, widths

FIRST = 16  # training text over the first border of positions


@dataclass(frozen=True)
class Settings:
    """Models of ``layers`` of width ``dim``, trained on texts of ``context`` bytes and tested on ``sequences`` of ``length``.

    All have as many parameters as softmax with a feed-forward of ``ffn_dim``.
    """

    mixers: tuple[str, ...]
    seeds: int
    context: int
    length: int
    sequences: int
    dim: int
    layers: int
    ffn_dim: int
    steps: int
    batch_size: int
    learning_rate: float


QUICK = Settings(
    mixers=("softmax", "softmax:window=64", "gla", "mamba2", "gated_deltanet", "rwkv7"), seeds=3, context=256, length=8192,
    sequences=16, dim=64, layers=2, ffn_dim=256, steps=400, batch_size=8, learning_rate=4e-3,
)  # fmt: skip
FULL = Settings(
    mixers=("softmax", "softmax:window=512", "gla", "mamba2", "gated_deltanet", "rwkv7"), seeds=3, context=2048, length=65536,
    sequences=8, dim=256, layers=4, ffn_dim=1024, steps=600, batch_size=8, learning_rate=2e-3,
)  # fmt: skip

_SAID = {
    "softmax": ("rotary: perplexity rises soon beyond the length trained at", "arXiv 2108.12409, figure 1"),
    "mamba2": ("trained at 2k: diverges beyond it; not if training carries states over", "arXiv 2507.02782, figure 1"),
    "gla": ("trained at 512: diverges beyond it; not if training carries states over", "arXiv 2507.02782, figure 1"),
    "rwkv7": ("2.9B, trained at 4k: finds passkeys up to 28k, then fewer and fewer", "RWKV-X, arXiv 2504.21463, figure 1"),
    "gated_deltanet": ("lowest perplexity of the recurrent models, out to 20k", "arXiv 2412.06464, figure 2"),
}


@cache
def _width(mixer: str, dim: int, layers: int, ffn_dim: int) -> int | None:
    """Feed-forward width for the common number of parameters; None if there is none."""
    try:
        return widths({mixer: Stack.of(mixer)}, dim=dim, layers=layers, ffn_dim=ffn_dim)[mixer]
    except Unequal:
        return None


def runs(settings: Settings, _done: Done) -> list[Run]:
    """A model of each mixer and seed."""
    same = {
        name: getattr(settings, name)
        for name in ("context", "length", "sequences", "dim", "layers", "steps", "batch_size", "learning_rate")
    }  # fmt: skip
    wide = {m: _width(m, settings.dim, settings.layers, settings.ffn_dim) for m in settings.mixers}
    return [{"mixer": m, "ffn_dim": wide[m], **same, "seed": seed} for seed in range(settings.seeds) for m in settings.mixers]


def measure(run: Run) -> Result:
    """Train and test a model: ``carried`` and ``fresh`` bits per byte between consecutive positions of ``borders``."""
    if run["ffn_dim"] is None:
        size = f"{run['layers']} layers of width {run['dim']}"
        raise LeftOut(f"{size} have more parameters than the other models, however small the feed-forward")
    ids = _texts(corpus().validation, run["length"], run["sequences"]).to(run["device"])
    model, bits_per_byte = on_text(Stack.of(run["mixer"]), run)
    edges = borders(run["context"], run["length"])
    read = {name: losses(model, ids, run["context"], carried=name == "carried") for name in ("carried", "fresh")}
    return {
        "bits_per_byte": bits_per_byte,
        "parameters": sum(p.numel() for p in model.parameters()),
        "borders": edges,
        **{name: averages(loss, edges) for name, loss in read.items()},
    }


def _texts(text: np.ndarray, length: int, count: int) -> Tensor:
    """``count`` evenly spaced texts of ``length`` from ``text`` [n], without overlap: [count, length] int64."""
    whole = len(text) // length
    if whole < 1:
        raise LeftOut(f"the validation text has {len(text):,} bytes, but {length:,} are needed")
    picked = np.unique(np.linspace(0, whole - 1, min(count, whole)).round().astype(int))
    return torch.from_numpy(text[: whole * length].reshape(whole, length)[picked].astype(np.int64))


def borders(context: int, length: int) -> list[int]:
    """Positions that double from a 16th of ``context`` up to ``length``: losses are averaged from one to the next."""
    first = max(1, context // FIRST)
    return [first << i for i in range(int(math.log2(length // first)) + 1)]


@torch.inference_mode()
def losses(model: LanguageModel, ids: Tensor, segment: int, *, carried: bool) -> Tensor:
    """Bits [B, T - 1] of each of ``ids`` [B, T] but the first, given those before it.

    The text is read ``segment`` bytes at a time. With ``carried`` a segment starts from the previous one's final state, else from an
    empty state.
    """
    state, bits = None, []
    for start in range(0, ids.shape[1] - 1, segment):
        piece, following = ids[:, start : start + segment], ids[:, start + 1 : start + segment + 1]
        logits, state = model(piece, state if carried else None, return_state=True)
        scores = logits[:, : following.shape[1]].log_softmax(-1)
        bits.append(-scores.gather(-1, following[..., None])[..., 0] / math.log(2))
    return torch.cat(bits, 1)


def averages(loss: Tensor, edges: Sequence[int]) -> list[float]:
    """Means of ``loss`` [B, T - 1] over predictions from 1 to ``edges[0]`` bytes of text, then up to ``edges[1]``, ..."""
    starts = [0, *edges[:-1]]
    return [loss[:, a:b].double().mean().item() for a, b in zip(starts, edges, strict=True)]


def rows(settings: Settings, done: Done) -> list[Row]:
    """A line for each mixer; "curve" holds the figures at each stretch of positions. ``gain``: bits saved by the carried state."""
    table = []
    for (mixer,), group in grouped(done, "mixer").items():
        curve = [_point(i, border, [result for _, result in group]) for i, border in enumerate(group[0][1]["borders"])]
        trained_at = next(point for point in curve if point["positions"] == settings.context)
        learned = {key: trained_at[f"carried{end}"] for key, end in (("learned", ""), ("learned_spread", "_spread"))}
        table.append({"mixer": mixer, **learned, **curve[-1], "curve": curve})
    return [{**row, **_paper(row, table)} for row in table]


def _point(i: int, border: int, results: list[Result]) -> Row:
    """Figures of a range of positions; no mean if any seed's is not finite."""
    carried, fresh = ([result[name][i] for result in results] for name in ("carried", "fresh"))
    gain = [None if None in (c, f) else f - c for c, f in zip(carried, fresh, strict=True)]
    point: Row = {"positions": border}
    for name, values in (("carried", carried), ("fresh", fresh), ("gain", gain)):
        point |= mean_and_spread(name, [] if None in values else values)
    return point


def _paper(row: Row, table: list[Row]) -> Row:
    """Findings of papers on the mixer, and whether they show here: a loss that rises with a long past, or the lowest loss."""
    variant = variants.parse(row["mixer"])
    said, source = (None, None) if variant.windowed else _SAID.get(variant.name, (None, None))
    agrees = None
    if variant.name == "gated_deltanet":
        others = [other["carried"] for other in table if _recurrent_but(variant.name, other) and other["carried"] is not None]
        agrees = row["carried"] is not None and row["carried"] <= min(others) if others else None
    elif said is not None and variant.name != "rwkv7" and row["learned"] is not None:  # the claim on rwkv7 is about something else
        agrees = row["gain"] is None or row["gain"] < 0  # text may get harder, which the reset state shows as well
    return {"paper_says": said, "source": source, "agrees": agrees}


def _recurrent_but(name: str, row: Row) -> bool:
    """True if the row belongs to a recurrent mixer other than ``name``."""
    other = variants.parse(row["mixer"]).name
    return other != name and mixers.info(other).recurrent


def charts(settings: Settings, table: list[Row]) -> list[Chart]:
    """Plots of the loss by position with the carried state, and of its gain over a reset state."""
    across = Measure("positions", "bytes", lambda values: logarithmic(values, base=2), tokens)
    carried = Heading(
        "carried",
        "Loss by position",
        "Bits per byte between this position and the one before, with the state of the whole past; lower is better. Training texts had "
        f"{settings.context:,} bytes.",
    )
    gain = Heading(
        "gain",
        "Gain from the past",
        f"Bits per byte saved on the same bytes, compared with a state reset every {settings.context:,} bytes. Below 0 the past harms.",
    )
    points = [{**point, "mixer": row["mixer"]} for row in table for point in row["curve"]]
    drawn = (
        curves(carried, points, across, Measure("carried", "bits per byte", linear), found=_ends(table, "carried")),
        curves(gain, points, across, Measure("gain", "bits per byte saved", linear), found=_ends(table, "gain")),
    )
    return [chart for chart in drawn if chart is not None]


def _ends(table: list[Row], key: str) -> str:
    """The figures at the longest text."""
    ends = ", ".join(f"{variants.parse(row['mixer']).label} {'–' if row[key] is None else share(row[key])}" for row in table)
    return f"Up to byte {max(row['positions'] for row in table):,}: {ends}."


STUDY = Study(
    title="Texts longer than any of the training",
    question="Does a model trained on short texts work on longer ones? All have equal parameters, text and steps. "
    "Measured are the bits per byte of held-out text by position, once with the state carried from the first byte and once with the state "
    "reset after every segment as long as a training text.",
    quick=QUICK,
    full=FULL,
    runs=runs,
    measure=measure,
    rows=rows,
    columns=(
        Column("mixer", "mixer"), Column("learned", "bits/byte at the end of a training length", share, spread=True),
        Column("positions", "read up to byte", lambda n: f"{n:,}"), Column("carried", "bits/byte there, past carried", share, spread=True),
        Column("fresh", "bits/byte there, past forgotten", share, spread=True), Column("gain", "saved by the past", share, spread=True),
    ),
    charts=charts,
    notes=(
        "The text is the source of Python's standard library. The held-out text consists of blocks of 64 KiB, most of several files.",
        "The papers' models are 100 to 1,000 times as large and saw as many times more text, so their states could overfit to one length.",
        "Recurrent models that diverge there need not diverge here.",
        "A mixer diverges if the past saves less than 0 bits. A loss that is not finite in one of the seeds is shown as –.",
        "A reset also loses the few bytes just before it. The row of a small window, which sees little else, shows what they save.",
    ),
)  # fmt: skip
