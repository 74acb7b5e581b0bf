"""Hybrids: softmax in a share of the layers, a recurrent mixer in the others.

All stacks have equally many parameters. Each is trained on multi-query associative recall, which exceeds a small state's capacity, and on
a text by bytes; then its bytes of state and decoding speed after a long context are measured. This is the question of
Waleffe et al. (arXiv 2406.07887), who count feed-forwards as layers too: their hybrid of 24 Mamba-2, 4 attention and 28
feed-forward layers has 28 blocks here, with a share of 1/7.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import Any

import torch

from linattn.experiment.study import Column, Done, Result, Row, Run, Study, grouped, mean_and_spread, number, share
from linattn.generate import stream
from linattn.generate.prefill import prefill
from linattn.models import LanguageModel
from linattn.models.pattern import written
from linattn.report.charts import Chart
from linattn.report.plot import Heading
from linattn.report.scales import Scale, linear
from linattn.report.words import memory
from linattn.reproduce import synthetic, variants
from linattn.reproduce.charts import Measure, curves, in_bytes, share_of
from linattn.reproduce.training import VOCABULARY, Stack, on_recall, on_text, widths

ALIKE = 0.05  # tolerance of equal recall
LEARNED = 0.5  # minimum recall of softmax alone for a comparison
ROUNDS = 3  # of decoding; stacks alternate in each, so that other load affects all


@dataclass(frozen=True)
class Settings:
    """Stacks of ``layers`` of width ``dim`` with ``shares`` of softmax, with as many parameters as softmax alone with a feed-forward of
    ``ffn_dim``.

    ``recall`` and ``text`` are the trainings, ``context`` and ``decoded`` numbers of tokens read and then decoded.
    """

    mixers: tuple[str, ...]
    seeds: int
    shares: tuple[str, ...]
    layers: int
    dim: int
    ffn_dim: int
    recall: dict[str, Any]
    text: dict[str, Any]
    context: int
    decoded: int


QUICK = Settings(
    mixers=("mamba2:state_size=4",), seeds=2, shares=("0", "1/4", "1/2", "1"), layers=4, dim=64, ffn_dim=192,
    recall={"lengths": [[16, 2], [32, 4], [64, 8]], "vocab_size": 64, "examples": 8192, "epochs": 1, "batch_size": 32,
            "learning_rate": 2e-3},
    text={"context": 256, "batch_size": 8, "steps": 200, "learning_rate": 4e-3},
    context=4096, decoded=64,
)  # fmt: skip
FULL = Settings(
    mixers=("mamba2:state_size=16",), seeds=3, shares=("0", "1/12", "1/6", "1/4", "1/2", "1"), layers=12, dim=128, ffn_dim=384,
    recall={"lengths": [[64, 4], [128, 8], [256, 16], [256, 32], [256, 64]], "vocab_size": 8192, "examples": 25000, "epochs": 4,
            "batch_size": 128, "learning_rate": 3e-3, "tie_embeddings": True},
    text={"context": 1024, "batch_size": 16, "steps": 600, "learning_rate": 2e-3},
    context=65536, decoded=128,
)  # fmt: skip

_SAID = {
    "0": ("8B: behind the Transformer at copying and in-context learning", "arXiv 2406.07887, abstract"),
    "1/6": ("8B, 4 of 28: ahead of the Transformer in all 12 tasks, tokens up to 8 times as fast", "arXiv 2406.07887, abstract"),
    "1/4": ("recall as a Transformer's with 1/7 to 1/4; bits per byte hardly change with the share", "arXiv 2507.06457, abstract"),
}


def pattern(mixer: str, part: Fraction, layers: int) -> str:
    """``layers`` of ``mixer`` with softmax in ``part`` of them, spread evenly: ``"gla*6, softmax, gla*5"`` for 1/12 of 12.

    Raises:
        ValueError: if that is not a whole number of layers.
    """
    count = part * layers
    if count.denominator != 1 or not 0 <= part <= 1:
        raise ValueError(f"a share of softmax must be a whole number of the {layers} layers, but came as {part}")
    places = {int((i + Fraction(1, 2)) * layers / count) for i in range(int(count))}
    return written("softmax" if i in places else mixer for i in range(layers))


def stack(mixer: str, part: str, layers: int) -> Stack:
    """The variant ``mixer`` with a share of softmax."""
    variant = variants.parse(mixer)
    if variant.name == "softmax":
        raise ValueError(f"mixers must not be softmax, which every hybrid has already, but came as {mixer!r}")
    layered = pattern(variant.name, Fraction(part), layers)
    return Stack(layered, {variant.name: variant.options} if variant.options and part != "1" else {})


@cache
def _widths(mixer: str, shares: tuple[str, ...], layers: int, dim: int, ffn_dim: int) -> dict[str, int]:
    return widths({part: stack(mixer, part, layers) for part in shares}, dim=dim, layers=layers, ffn_dim=ffn_dim)


def runs(settings: Settings, done: Done) -> list[Run]:
    """Runs of every stack and seed on both trainings and then of decoding, one mixer after the other, since it measures times."""
    made = {
        (mixer, part): {"mixer": mixer, "share": part, "layers": settings.layers, "dim": settings.dim, "ffn_dim": width}
        for mixer in settings.mixers
        for part, width in _widths(mixer, settings.shares, settings.layers, settings.dim, settings.ffn_dim).items()
    }
    seeds, kinds = range(settings.seeds), {"recall": settings.recall, "text": settings.text}
    trainings = [{"kind": kind, **one, **of, "seed": seed} for seed in seeds for kind, of in kinds.items() for one in made.values()]
    if len(done) < len(trainings):
        return trainings
    models = {mixer: [made[mixer, part] for part in settings.shares] for mixer in settings.mixers}
    reading = {"context": settings.context, "decoded": settings.decoded}
    decodings = [{"kind": "decode", "mixer": mixer, "stacks": models[mixer], **reading} for mixer in settings.mixers]
    return trainings + decodings[: len(done) - len(trainings) + 1]


def measure(run: Run) -> Generator[None, None, Result]:
    """Run one training, or decode with all stacks of a mixer."""
    if run["kind"] == "recall":
        model, unseen = yield from on_recall(_stack_of(run), run)
        return {"recall": synthetic.accuracy(model, unseen)}
    if run["kind"] == "text":
        return {"bits_per_byte": on_text(_stack_of(run), run)[1]}
    configs = {one["share"]: _stack_of(one).config(**{name: one[name] for name in ("dim", "layers", "ffn_dim")}) for one in run["stacks"]}
    models = {part: LanguageModel(config).eval().to(run["device"]) for part, config in configs.items()}  # as fast as trained ones
    return {"shares": decoding(models, run["context"], run["decoded"])}


def _stack_of(run: Run) -> Stack:
    return stack(run["mixer"], run["share"], run["layers"])


@torch.inference_mode()
def decoding(models: dict[str, LanguageModel], context: int, decoded: int) -> dict[str, Result]:
    """Measure, for each of ``models``, the bytes of state after ``context`` tokens, the milliseconds of the next token, and how it was
    computed.

    Times are medians over ROUNDS of alternating models, after a warm-up; each round takes the median of the latter half of ``decoded``
    tokens.
    """
    ids = torch.randint(VOCABULARY, (1, context), generator=torch.Generator().manual_seed(0))
    taken: dict[str, list[float]] = {name: [] for name in models}
    kept, how = {}, {}
    for turn in range(1 + ROUNDS):
        for name, model in models.items():
            device = next(model.parameters()).device
            _, state = prefill(model.model, ids.to(device))
            kept[name] = state.nbytes
            milliseconds, how[name] = _per_token(model, ids[0, -1:].to(device), state, decoded)
            taken[name] += [milliseconds] if turn else []
    return {name: {"state_bytes": kept[name], "decode_ms": statistics.median(taken[name]), "how": how[name]} for name in models}


def _per_token(model: LanguageModel, ids: torch.Tensor, state: Any, decoded: int) -> tuple[float, str]:
    tokens, times = stream(model, ids, max_new_tokens=decoded, temperature=0.0, state=state), [time.perf_counter()]
    times += [time.perf_counter() for _ in tokens]
    each = [1e3 * (after - before) for before, after in zip(times, times[1:], strict=False)]
    return statistics.median(each[len(each) // 2 :]), tokens.how


def launched(how: str) -> str:
    """Describe for a table how a decoding step ran: its kind of capture, or as single operations."""
    _, captured, what = how.partition("by a captured step, a ")
    return what if captured else "operations"


def rows(settings: Settings, done: Done) -> list[Row]:
    """A line for each mixer and share."""
    kinds = {kind: [one for one in done if one[0]["kind"] == kind] for kind in ("recall", "text", "decode")}
    written = {run["mixer"]: result["shares"] for run, result in kinds["decode"] if "shares" in result}
    table = []
    for (mixer, part), group in grouped(kinds["recall"] + kinds["text"], "mixer", "share").items():
        row: Row = {"mixer": mixer, "share": part, "part": float(Fraction(part)), "layers": stack(mixer, part, settings.layers).pattern}
        for key in ("recall", "bits_per_byte"):
            row |= mean_and_spread(key, (result.get(key) for _, result in group))
        table.append({**row, **written.get(mixer, {}).get(part, {})})
    table.sort(key=lambda row: (settings.mixers.index(row["mixer"]), row["part"]))
    return [{**row, **_paper(row, table)} for row in table]


def _paper(row: Row, table: list[Row]) -> Row:
    """Findings of the papers at this share, and whether recall relative to softmax agrees, if softmax has learned it."""
    said, source = _SAID.get(row["share"], (None, None))
    alone = next((other["recall"] for other in table if other["mixer"] == row["mixer"] and other["share"] == "1"), None)
    agrees = None
    if said is not None and row["recall"] is not None and alone is not None and alone >= LEARNED:
        ahead = row["recall"] - alone
        if row["share"] == "0":
            agrees = ahead < -ALIKE
        elif row["share"] == "1/4":
            agrees = ahead >= -ALIKE
        else:
            agrees = ahead > 0 if abs(ahead) > ALIKE else None
    return {"paper_says": said, "source": source, "agrees": agrees}


def charts(settings: Settings, table: list[Row]) -> list[Chart]:
    """Plots of each figure over the share of softmax."""
    across = Measure("part", "share of softmax layers", lambda _: linear((0.0, 1.0)))
    long = f"{settings.context:,} bytes"
    wanted = (
        (share_of("recall", "share answered"), "Recall", "Share of keys that are answered with their value.", share),
        (Measure("bits_per_byte", "bits per byte", linear), "Text", "Bits per byte of text not trained on; lower is better.", share),
        (in_bytes("state_bytes", "bytes"), "Memory of the past", f"Bytes kept of {long} of context, in float32.", memory),
        (
            Measure("decode_ms", "milliseconds per token", _from_zero),
            "Writing a token",
            f"Time for a token after {long} of context.",
            number,
        ),
    )
    drawn = []
    for measured, title, meaning, write in wanted:
        shown = [row for row in table if row.get(measured.key) is not None]
        found = f"By the share of softmax: {', '.join(row['share'] + ': ' + write(row[measured.key]) for row in shown)}."
        drawn.append(curves(Heading(measured.key.replace("_", "-"), title, meaning), shown, across, measured, found=found))
    return [chart for chart in drawn if chart is not None]


def _from_zero(values: Iterable[float]) -> Scale:
    return linear(values, zero=True)


STUDY = Study(
    title="How many layers must keep everything",
    question="Some of the layers are softmax, the others a mixer with a state of fixed size; all models have equally many parameters. "
    "What does each share of softmax gain in recall and bits per byte, and what does it cost in memory and in time per token?",
    quick=QUICK,
    full=FULL,
    runs=runs,
    measure=measure,
    rows=rows,
    columns=(
        Column("mixer", "mixer"), Column("share", "share of softmax"), Column("layers", "layers"),
        Column("recall", "recall", share, spread=True), Column("bits_per_byte", "bits per byte", share, spread=True),
        Column("state_bytes", "kept of the context", memory), Column("decode_ms", "ms per token", number),
        Column("how", "step run as", launched),
    ),
    charts=charts,
    notes=(
        f"Agreement is judged by recall: differences of up to {ALIKE:g} do not count, and softmax alone must answer {LEARNED:.0%}.",
        "The share counts layers that mix tokens. The paper counts feed-forwards too: its 7 % of attention are 1/7 of the mixing layers.",
        "Softmax has rotary positions here; the attention in the paper's hybrid has none.",
        "The paper predicts its factor of 8 for 8 billion parameters and long contexts; at this size the overhead of the host counts.",
        "--quick has 4 layers, so it leaves out 1/12 and 1/6. On a CPU, times per token are of one thread.",
        "A longer training may lift a low recall: --quick's is a few hundred steps.",
        "Models that learn recall have a gated short convolution before their other layers, as in Zoology (arXiv 2312.04927).",
    ),
)  # fmt: skip
