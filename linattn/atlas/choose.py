"""Guide to choosing a mixer: the reader selects needs, and mixers are ranked by the committed results."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from linattn.atlas.evidence import Evidence, table
from linattn.atlas.measured import recurrence
from linattn.atlas.page import Entry, Page, figure
from linattn.atlas.text import Both, spoken
from linattn.bench.gpu.cases import usual
from linattn.mixers import cost
from linattn.report.words import figure as three
from linattn.report.words import memory, percent

if TYPE_CHECKING:
    from linattn.atlas.build import Atlas

ENTRY = Entry(
    "choose.html",
    Both("What to choose", "如何选择"),
    Both(
        "Say what you need: recall, length, memory, speed, kernels, checkpoints. The order follows from the committed measurements.",
        "说明你需要什么：回忆、长度、内存、速度、内核、已有权重。排序由仓库中的实测结果得出。",
    ),
)
DIM, TOKENS, SHAPE = 512, 65536, "B8 T4096 H16 D128"  # of the layer whose bytes are compared, and of the timed recurrence
# Published families of models that ``linattn.load`` converts, by their mixers.
CHECKPOINTS = {
    "mamba": ("mamba", "falcon_mamba"), "mamba2": ("mamba2",), "rwkv4": ("rwkv",), "rwkv6": ("rwkv6",), "rwkv7": ("rwkv7",),
    "gated_deltanet": ("qwen3_next", "gated_deltanet"), "rg_lru": ("recurrent_gemma",), "lightning": ("minimax",), "mlstm_block": ("xlstm",),
    "kda": ("kimi_linear", "kda"), "gla": ("gla",), "retnet": ("retnet",), "deltanet": ("delta_net",), "hgrn2": ("hgrn2",),
    "softmax": ("llama", "mistral", "qwen2", "qwen3", "gemma3_text", "gemma3"),
}  # fmt: skip


@dataclass(frozen=True)
class Need:
    """Need of a reader: a column of numbers by mixer; ``more``: larger is better."""

    key: str
    name: Both
    unit: Both
    more: bool
    values: dict[str, float]
    shown: dict[str, str]

    def data(self) -> dict[str, object]:
        """Data for the script."""
        words = {"name": self.name._asdict(), "unit": self.unit._asdict()}
        return {"key": self.key, **words, "more": self.more, "values": self.values, "shown": self.shown}


def needs(atlas: Atlas) -> list[Need]:
    """Columns for which there is evidence."""
    recall, length, *others = (read(atlas) for read in (_recall, _length, _kernel, _training, _checkpoints))
    named = {name for need in (recall, length, *others) for name in need.values}
    return [need for need in (recall, length, _memory(atlas, named), *others) if need.values]


def _body(atlas: Atlas, name: str) -> dict:
    return next((body for _, body in atlas.measured(f"{name}.json")), {"rows": []})


def _plain(rows: list[dict], key: str, best: bool) -> dict[str, float]:
    """Best value of ``key`` for each mixer with default options or those of the study, without softmax windows."""
    found: dict[str, float] = {}
    for row in rows:
        name = row["mixer"].partition(":")[0]
        if "window" not in row["mixer"] and row.get(key) is not None:
            found[name] = (max if best else min)(found.get(name, row[key]), row[key])
    return found


def _recall(atlas: Atlas) -> Need:
    rows = [r for r in _body(atlas, "reproduce-recall-full")["rows"] if r["task"] == "mqar"]
    values = _plain(rows, "accuracy", True)
    unit = Both("multi-query recall, best width", "多问联想回忆，最佳宽度")
    return Need("recall", Both("recall", "回忆"), unit, True, values, {n: percent(v) for n, v in values.items()})


def _length(atlas: Atlas) -> Need:
    body = _body(atlas, "reproduce-extrapolation-full")
    values = _plain(body["rows"], "carried", False)
    times = body["settings"]["length"] // body["settings"]["context"] if values else 0
    unit = Both(f"bits per byte at {times} × the trained length", f"{times} 倍训练长度处的每字节比特数")
    return Need("length", Both("long texts", "长文本"), unit, False, values, {n: f"{v:.2f}" for n, v in values.items()})


def _memory(atlas: Atlas, names: set[str]) -> Need:
    """Bytes of the systems ``names`` only, since counting all takes a minute."""
    values = {}
    for name, seen in atlas.inspections.items():
        if name in names and seen.info.resumable:
            kept = cost(name, dim=DIM, tokens=256 if seen.info.recurrent else TOKENS).state_bytes
            values[name] = float(kept or 0)
    unit = Both(f"bytes of a layer of width {DIM} after {TOKENS:,} tokens", f"宽 {DIM} 的一层在 {TOKENS:,} 个 token 之后的字节数")
    return Need("memory", Both("little memory", "内存小"), unit, False, values, {n: memory(int(v)) for n, v in values.items()})


def _kernel(atlas: Atlas) -> Need:
    times: dict[str, float] = {}
    for row in _body(atlas, "ops-h200")["rows"]:
        own = row["library"] == ("torch" if row["family"] == "softmax" else "linattn")
        as_usual = (row["decay"], row["decay_dtype"]) == usual(row["family"])
        if own and as_usual and row["shape"] == SHAPE and row["mode"] == "forward+backward" and row["ms"]:
            times[row["family"]] = row["ms"]
    values = {n: times[kind] for n, seen in atlas.inspections.items() if seen.info.resumable and (kind := recurrence(seen)) in times}
    unit = Both(f"ms, forward and backward of the recurrence, {SHAPE}, H200", f"毫秒，递推的前向与反向，{SHAPE}，H200")
    return Need("kernel", Both("own GPU kernel", "有专用 GPU 内核"), unit, False, values, {n: three(v) for n, v in values.items()})


def _training(atlas: Atlas) -> Need:
    values: dict[str, float] = {}
    for row in _body(atlas, "train-h200")["rows"]:
        name = "softmax" if row["model"] == "llama" else row["model"]
        if row.get("tokens_per_second"):
            values[name] = max(values.get(name, 0.0), row["tokens_per_second"])
    unit = Both(
        "tokens/s, whole models on an H200 (softmax: Llama of transformers)",
        "token/秒，H200 上的整个模型（softmax 为 transformers 的 Llama）",
    )
    return Need("training", Both("training speed", "训练速度"), unit, True, values, {n: f"{v:,.0f}" for n, v in values.items()})


def _checkpoints(atlas: Atlas) -> Need:
    values = {name: float(len(kinds)) for name, kinds in CHECKPOINTS.items() if name in atlas.names}
    unit = Both("published families that linattn.load converts", "linattn.load 能转换的公开模型族")
    return Need("checkpoints", Both("published weights", "已有权重"), unit, True, values, {n: ", ".join(CHECKPOINTS[n]) for n in values})


TEXT = (
    Both(
        "Choose what matters to you. A mixer's place is its mean rank over the chosen columns; a mixer without a measurement in a chosen "
        "column stands below those that have all of them. The list covers what was measured with this library, no more.",
        "选择你在意的方面。一种混合层的名次是它在所选各列中的平均排名；所选列中缺少实测的，排在齐全的之后。表中只有用本库实测过的内容。",
    ),
    Both(
        "The rank of a mixer does not predict a whole model: if recall matters and memory is scarce, measure a hybrid too.",
        "单个混合层的名次不能代表整个模型：若看重回忆而内存又紧张，也请实测混合模型。",
    ),
)
CAPTION = Both(
    "Every number comes from a result file of this library or from its cost sheet.",
    "每个数字都出自本库的结果文件，或由开销表算出。",
)


def pages(atlas: Atlas) -> Iterator[Page]:
    """Make the page."""
    columns = needs(atlas)
    systems = sorted({name for need in columns for name in need.values} & set(atlas.inspections))
    data = {
        "needs": [need.data() for need in columns],
        "systems": [{"name": n, "title": atlas.inspections[n].title._asdict()} for n in systems],
    }
    evidence = Evidence(atlas)
    tables = (
        (Both("Recall", "回忆"), evidence.recall()), (Both("Length", "长度"), evidence.length()), (Both("State tracking", "状态跟踪"), evidence.tracking()),
        (Both("Training speed", "训练速度"), evidence.training()), (Both("Decoding", "解码"), evidence.decoding()),
    )  # fmt: skip
    shown = "".join(f"<details><summary>{spoken(title)}</summary>{table(found)}</details>" for title, found in tables)
    hybrid = Both("Hybrid models", "混合模型")
    link = f'<p><a href="methods/hybrids.html">{spoken(hybrid)} →</a></p>'
    behind = f"<h2>{spoken(Both('The measurements behind it', '背后的实测'))}</h2>{shown}"
    body = spoken(TEXT[0], "p") + figure("choose", "choose", caption=CAPTION) + spoken(TEXT[1], "p") + link + behind
    yield Page(ENTRY.path, ENTRY.name, body, {"choose": data}, lead=ENTRY.summary)
