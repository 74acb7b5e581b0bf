"""Measurements of one system: rows of the result files of ``benchmarks/results``, each with its source."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from linattn.atlas.algebra import Spec
from linattn.atlas.chinese import both
from linattn.atlas.inspection import Inspection
from linattn.atlas.text import Both
from linattn.bench.gpu.cases import usual
from linattn.compare.tasks import load
from linattn.report.words import figure
from linattn.reproduce import results
from linattn.state import content_of

if TYPE_CHECKING:
    from linattn.atlas.build import Atlas


@dataclass(frozen=True)
class Measured:
    """Table of figures with its subject and source: ``heads`` name the columns of ``rows``.

    ``source`` and ``rows`` are in English, as in the result files; :func:`linattn.atlas.chinese.both` translates them.
    """

    title: Both
    source: str
    heads: list[Both]
    rows: list[list[str]]


def of(atlas: Atlas, seen: Inspection) -> Iterator[Measured]:
    """Tables for one system; empty if nothing was measured."""
    for path, body in atlas.measured("*.json"):
        with content_of(path):
            table = _READERS.get(str(body.get("schema")), _nothing)(body, seen)
        if table is not None and table.rows:
            yield table


def recurrence(seen: Inspection) -> str | None:
    """Kind of recurrence of ``linattn bench ops`` whose kernels this system runs; None for any other."""
    if seen.info.name == "softmax":
        return "softmax"
    return _kind(seen.spec) if seen.spec and seen.info.causal else None


def _scanned(spec: Spec) -> bool:
    """True if keys or values are single numbers: such a recurrence runs by the kernels of scans."""
    return 1 in spec.sizes[1:]


def _kind(spec: Spec) -> str | None:
    if spec.normalize or _scanned(spec):
        return None
    kinds = {
        ("none", "none"): "none", ("constant", "none"): "constant", ("head", "none"): "head", ("channel", "none"): "channel",
        ("none", "delta"): "delta", ("head", "delta"): "gated_delta", ("channel", "delta"): "kda", ("channel", "pair"): "erase",
    }  # fmt: skip
    kind = kinds.get((spec.decay, spec.erase))
    if spec.bonus:
        return "rwkv6" if kind == "channel" else None
    return kind


def _where(body: dict) -> str:
    run = body["runs"][-1]
    return f"{run['cpu']}, {_threads(run)}, {run['date']}" if body["card"] == "cpu" else f"{body['card']}, {run['date']}"


def _threads(machine: dict) -> str:
    return "1 thread" if machine["threads"] == 1 else f"{machine['threads']} threads"


def _ops(body: dict, seen: Inspection) -> Measured | None:
    """Milliseconds of one pass of the recurrence, for this library and others."""
    kind = recurrence(seen)
    ours = "torch" if kind == "softmax" else "linattn"
    times: dict[tuple[str, str], dict[str, float]] = {}
    for row in body["rows"]:
        if row["family"] != kind or (row["decay"], row["decay_dtype"]) != usual(row["family"]):
            continue
        if row["ms"] and row["mode"] in ("forward", "forward+backward", "decode"):
            times.setdefault((row["shape"], row["mode"]), {})[row["library"]] = row["ms"]
    others = sorted({library for found in times.values() for library in found} - {ours})
    rows = [
        [shape, mode, figure(found[ours]), *(figure(found[o]) if o in found else "–" for o in others)]
        for (shape, mode), found in times.items()
        if ours in found
    ]
    return Measured(
        Both("Its recurrence on a GPU, milliseconds", "它的递推在 GPU 上的耗时（毫秒）"),
        _where(body),
        [Both("shape", "形状"), Both("pass", "计算"), *(Both(name, name) for name in (ours, *others))],
        rows,
    )


def _train(body: dict, seen: Inspection) -> Measured | None:
    """Tokens per second of a whole language model."""
    rows = [
        [r["library"], "torch.compile" if r.get("compiled") else "–", f"{r['tokens_per_second']:,.0f}", f"{r['peak_gb']:.1f} GB"]
        for r in body["rows"]
        if r.get("model") == seen.info.name and r.get("tokens_per_second")
    ]
    heads = [Both("library", "库"), Both("compiled", "编译"), Both("tokens/s", "token/秒"), Both("peak memory", "峰值显存")]
    return Measured(Both("Training a language model", "训练语言模型"), _where(body), heads, rows)


def _train_cpu(body: dict, seen: Inspection) -> Measured | None:
    """Tokens per second of a small model on a CPU, measured in alternation with Llama."""
    rows = [
        [r["library"], r["dtype"], f"{r['tokens_per_second']:,.0f}", f"{r['times_llama']:.2f}"]
        for r in body["rows"]
        if r["model"] == seen.info.name
    ]
    heads = [Both("library", "库"), Both("dtype", "数据类型"), Both("tokens/s", "token/秒"), Both("beside Llama", "与 Llama 之比")]
    title = Both("Training a small language model on a CPU", "在 CPU 上训练小语言模型")
    return Measured(title, _where(body), heads, rows)


def _vision(body: dict, seen: Inspection) -> Measured | None:
    """Tokens per second of one layer over images of growing size, softmax beside it."""
    sides = sorted({r["side"] for r in body["rows"]})
    speeds: dict[tuple[str, str], dict[int, float]] = {}
    for r in body["rows"]:
        if r["mixer"] in (seen.info.name, "softmax"):
            speeds.setdefault((r["mixer"], r["mode"]), {})[r["side"]] = r["tokens_per_second"]
    rows = [[*name, *(figure(found[n] / 1e3) if n in found else "–" for n in sides)] for name, found in speeds.items()]
    if not any(r["mixer"] == seen.info.name for r in body["rows"]):
        rows = []
    heads = [Both("mixer", "混合层"), Both("pass", "计算"), *(Both(f"{n} × {n}", f"{n} × {n}") for n in sides)]
    title = Both("Over images, thousand tokens per second", "处理图像的速度（千 token/秒）")
    return Measured(title, _where(body), heads, rows)


def _decode(body: dict, seen: Inspection) -> Measured | None:
    """Milliseconds per token of a whole language model, and of one read of its weights and state."""
    rows = [
        [r["size"], r["dtype"], f"{r['rows']}", f"{r['context']:,}", f"{r['step_ms']:.3f}", f"{r['floor_ms']:.3f}"]
        for r in body["rows"]
        if r["library"] == "linattn" and r["model"] == seen.info.name and r.get("step_ms")
    ]
    heads = [
        Both("parameters", "参数量"), Both("dtype", "数据类型"), Both("rows", "行数"), Both("tokens before", "此前的 token 数"),
        Both("a token, ms", "每个 token（毫秒）"), Both("weights and state read once, ms", "权重与状态各读一遍（毫秒）"),
    ]  # fmt: skip
    return Measured(Both("Decoding with a language model", "语言模型的解码"), _where(body), heads, rows)


def _nothing(_body: dict, _seen: Inspection) -> Measured | None:
    return None


# Suites of ``linattn bench`` by columns that identify their rows.
_SUITES = (
    ({"bound_ms"}, _nothing), ({"times_llama"}, _train_cpu), ({"side"}, _vision), ({"floor_ms"}, _decode),
    ({"library", "tokens_per_second"}, _train), ({"decay_dtype", "ms"}, _ops),
)  # fmt: skip


def _bench(body: dict, seen: Inspection) -> Measured | None:
    read = next((read for columns, read in _SUITES if any(columns <= row.keys() for row in body["rows"])), _nothing)
    return read(body, seen)


def _compared(body: dict, seen: Inspection) -> Measured | None:
    """Results of a model in ``linattn compare``: on text, or on one of its tasks."""
    machine = body["machine"]
    made = f"{machine['accelerator'] or machine['cpu']}, {_threads(machine)}, {body['created'][:10]}"
    own = [m for m in body["mixers"] if m["name"] == seen.info.name]
    return (_judged if "task" in body else _of_text)(body, own, made)


def _of_text(body: dict, mixers: list[dict], made: str) -> Measured:
    rows = []
    for m in mixers:
        trained = m["training"]
        first, last = (f"{trained['history'][i]['validation_bits_per_byte']:.3f}" for i in (0, -1))
        decode = ", ".join(f"{c['decode_ms']:.2f} ms ({c['context']:,})" for c in m["contexts"])
        rows.append([first, last, f"{trained['tokens_per_second']:,.0f}", decode])
    o = body["options"]
    heads = [
        Both("bits per byte at first", "最初的每字节比特数"),
        Both("at the end", "最后"),
        Both("training tokens/s", "训练 token/秒"),
        Both("a token (context)", "每个 token（上下文）"),
    ]
    title = Both(
        f"A model of {o['layers']} layers after {o['steps']} steps: does it learn at all?",
        f"{o['layers']} 层的小模型训练 {o['steps']} 步：能否学习？",
    )
    return Measured(title, made, heads, rows)


def _judged(body: dict, mixers: list[dict], made: str) -> Measured:
    """Scores of the task, the mean and spread over its seeds, without machine-dependent speed."""
    figures = [f for f in load(body["task"]).figures if not f.key.endswith("_per_second")]
    rows = [[f.cell(m) for f in figures] for m in mixers]
    return Measured(both(body["title"]), made, [both(f.heading) for f in figures], rows)


def _reproduced(body: dict, seen: Inspection) -> Measured | None:
    """Rows of a study of ``linattn reproduce`` with this mixer, written as in its report."""
    heads, rows = results.of(body, seen.info.name)
    kinds = dict.fromkeys(m["accelerator"] or m["cpu"] for m in body["machines"])  # possibly continued on another machine of the kind
    command = re.sub(r" --out \S+", "", str(body["command"]))  # a path on that machine
    made = [command, *kinds, str(body["created"])[:10]]
    return Measured(both(body["title"]), ", ".join(made), [both(h) for h in heads], rows)


_READERS = {"linattn.bench.gpu": _bench, "linattn.compare": _compared, "linattn.reproduce": _reproduced}
