"""What the project has measured of one system: rows of the result files of ``benchmarks/results``, each with where it comes from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from linattn.atlas.look import Look, Spec
from linattn.atlas.study_words import both
from linattn.atlas.text import Both
from linattn.bench.gpu.cases import DECAY
from linattn.report.words import figure
from linattn.reproduce import results

if TYPE_CHECKING:
    from linattn.atlas.build import Atlas


@dataclass(frozen=True)
class Measured:
    """A table of figures with what was measured and where: ``heads`` name the columns of ``rows``."""

    title: Both
    source: str
    heads: list[Both]
    rows: list[list[str]]


def of(atlas: Atlas, look: Look) -> Iterator[Measured]:
    """All tables for one system; none where nothing was measured."""
    for body in atlas.measured("*.json"):
        table = _READERS.get(str(body.get("schema")), _nothing)(body, look)
        if table is not None and table.rows:
            yield table


def recurrence(look: Look) -> str | None:
    """The kind of recurrence of ``linattn bench ops`` whose kernels this system runs; None where it is none of them."""
    if look.info.name == "softmax":
        return "softmax"
    return _kind(look.spec) if look.spec and look.info.causal else None


def _scanned(spec: Spec) -> bool:
    """Whether keys or values are single numbers: such a recurrence runs as a scan, by other kernels."""
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


def _ops(body: dict, look: Look) -> Measured | None:
    """Milliseconds of one pass of the recurrence, ours and the others'."""
    kind = recurrence(look)
    ours = "torch" if kind == "softmax" else "linattn"
    times: dict[tuple[str, str], dict[str, float]] = {}
    for row in body["rows"]:
        usual = row["mode"] in ("forward", "forward+backward", "decode") and row["decay"] in (None, DECAY)
        if row["family"] == kind and row["ms"] and usual:
            times.setdefault((row["shape"], row["mode"]), {})[row["library"]] = row["ms"]
    others = sorted({library for found in times.values() for library in found} - {ours})
    rows = [
        [shape, mode, figure(found[ours]), *(figure(found[o]) if o in found else "–" for o in others)]
        for (shape, mode), found in times.items()
        if ours in found
    ]
    return Measured(
        Both("Its recurrence on a GPU, milliseconds", "它的递推在 GPU 上的耗时（毫秒）"),
        f"{body['card']}, {body['runs'][-1]['date']}",
        [Both("shape", "形状"), Both("pass", "计算"), *(Both(name, name) for name in (ours, *others))],
        rows,
    )


def _train(body: dict, look: Look) -> Measured | None:
    """Tokens per second of a whole language model."""
    rows = [
        [r["library"], "torch.compile" if r.get("compiled") else "–", f"{r['tokens_per_second']:,.0f}", f"{r['peak_gb']:.1f} GB"]
        for r in body["rows"]
        if r.get("model") == look.info.name and r.get("tokens_per_second")
    ]
    heads = [Both("library", "库"), Both("compiled", "编译"), Both("tokens/s", "token/秒"), Both("peak memory", "峰值显存")]
    return Measured(Both("Training a language model", "训练语言模型"), f"{body['card']}, {body['runs'][-1]['date']}", heads, rows)


def _train_cpu(body: dict, look: Look) -> Measured | None:
    """The same of a small one on a CPU, whose steps took turns with Llama's."""
    rows = [
        [r["library"], r["dtype"], f"{r['tokens_per_second']:,.0f}", f"{r['times_llama']:.2f}"]
        for r in body["rows"]
        if r["model"] == look.info.name
    ]
    run = body["runs"][-1]
    heads = [Both("library", "库"), Both("dtype", "数据类型"), Both("tokens/s", "token/秒"), Both("beside Llama", "与 Llama 之比")]
    title = Both("Training a small language model on a CPU", "在 CPU 上训练小语言模型")
    return Measured(title, f"{run['cpu']}, {run['threads']} threads, {run['date']}", heads, rows)


def _gpu(body: dict, look: Look) -> Measured | None:
    if any("times_llama" in row for row in body["rows"]):
        return _train_cpu(body, look)
    return _train(body, look) if any("model" in row for row in body["rows"]) else _ops(body, look)


def _compared(body: dict, look: Look) -> Measured | None:
    """A small language model on text."""
    rows = []
    for m in body["mixers"]:
        if m["name"] == look.info.name:
            decode = ", ".join(f"{ms:.2f} ms ({tokens})" for tokens, ms in m["decode_ms"].items())
            rows.append([f"{m['validation_bits_per_byte']:.3f}", f"{m['tokens_per_second']:,}", decode])
    o = body["options"]
    heads = [
        Both("bits per byte", "每字节比特数"),
        Both("training tokens/s", "训练 token/秒"),
        Both("a token (context)", "每个 token（上下文）"),
    ]
    title = Both(
        f"A model of {o['layers']} layers after {o['steps']} steps: does it learn at all?",
        f"{o['layers']} 层的小模型训练 {o['steps']} 步：它学得动吗？",
    )
    return Measured(title, f"{body['cpu']}, {body['threads']} threads, {body['date']}", heads, rows)


def _reproduced(body: dict, look: Look) -> Measured | None:
    """Rows of a study of ``linattn reproduce`` whose mixer this is, written as in its report."""
    heads, rows = results.of(body, look.info.name)
    made = [str(body["command"]), *(m["accelerator"] or m["cpu"] for m in body["machines"]), str(body["created"])[:10]]
    return Measured(both(body["title"]), ", ".join(made), [both(h) for h in heads], rows)


def _nothing(_body: dict, _look: Look) -> None:
    return None


_READERS = {"linattn.bench.gpu": _gpu, "linattn.compare.summary": _compared, "linattn.reproduce": _reproduced}
