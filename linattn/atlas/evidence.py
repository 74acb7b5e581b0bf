"""Evidence for choices: tables from the committed result files, with their sources."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from linattn.atlas.chinese import both
from linattn.atlas.text import Both, labelled, spoken, unbroken
from linattn.models import pattern
from linattn.report.words import memory, percent
from linattn.reproduce.hybrids import launched

if TYPE_CHECKING:
    from linattn.atlas.build import Atlas


@dataclass(frozen=True)
class Table:
    """Measured figures: column headings, rows of cells, and the file they come from with its machine and date."""

    title: Both
    heads: list[Both]
    rows: list[list[str]]
    source: str


NOTHING = Both("No results of this measurement were found when the page was built.", "生成本页时没有找到这项测量的结果文件。")


def table(found: Table | None) -> str:
    """Render ``found`` as HTML; a sentence if there is none."""
    if found is None or not found.rows:
        return f'<div class="note">{spoken(NOTHING, "p")}</div>'
    head = "".join(f'<th scope="col">{spoken(h)}</th>' for h in found.heads)
    rows = "".join("<tr>" + "".join(f"<td>{unbroken(cell)}</td>" for cell in row) + "</tr>" for row in found.rows)
    caption = f'<caption>{spoken(found.title)} <span class="small">{found.source}</span></caption>'
    frame = f'<div class="scroll" tabindex="0" role="region" {labelled(found.title)}>'
    return f"{frame}<table>{caption}<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"


MIXER = Both("mixer", "混合层")


@dataclass(frozen=True)
class Evidence:
    """Readers of the committed results, each for one question; None where a file is missing."""

    atlas: Atlas

    def _body(self, name: str) -> dict[str, Any] | None:
        return next((body for _, body in self.atlas.measured(f"{name}.json")), None)

    def hybrids(self) -> Table | None:
        """Recall, bits per byte, bytes and time of models with a growing share of softmax layers."""
        body = self._body("reproduce-hybrids-full")
        if body is None:
            return None
        rows = [
            [row["share"], percent(row["recall"]), f"{row['bits_per_byte']:.3f}", memory(row["state_bytes"]), f"{row['decode_ms']:.3f}", spoken(both(launched(row["how"]))), _codes(period(row["layers"]))]
            for row in body["rows"]
        ]  # fmt: skip
        setting = body["settings"]["context"]
        heads = [
            Both("share of softmax layers", "softmax 层占比"), Both("recall", "回忆正确率"), Both("bits per byte", "每字节比特数"),
            Both(f"kept after {setting:,} tokens", f"{setting:,} 个 token 后保留"), Both("ms per token", "毫秒/token"), both("step run as"), Both("pattern", "模式"),
        ]  # fmt: skip
        return Table(Both("Mamba-2 with softmax layers", "混入 softmax 层的 Mamba-2"), heads, rows, _of(body))

    def recall(self) -> Table | None:
        """Accuracy in multi-query recall, by bytes of state."""
        body = self._body("reproduce-recall-full")
        if body is None:
            return None
        found = sorted((r for r in body["rows"] if r["task"] == "mqar"), key=lambda r: (-r["accuracy"], r["state_bytes"]))
        best: dict[str, dict] = {}
        for row in found:
            best.setdefault(row["mixer"], row)
        rows = [[_code(r["mixer"]), percent(r["accuracy"]), percent(r["hardest"]), memory(r["state_bytes"])] for r in best.values()]
        heads = [MIXER, Both("recall", "回忆正确率"), Both("with 256 pairs", "256 对时"), Both("state", "状态")]
        return Table(Both("Recall: the best width of each mixer", "回忆：各混合层的最佳宽度"), heads, rows, _of(body))

    def length(self) -> Table | None:
        """Bits per byte far beyond the trained length, with the state carried over."""
        body = self._body("reproduce-extrapolation-full")
        if body is None:
            return None
        rows = [[_code(r["mixer"]), f"{r['learned']:.3f}", f"{r['carried']:.3f}"] for r in sorted(body["rows"], key=lambda r: r["carried"])]
        longest = max(r["positions"] for r in body["rows"])
        trained = body["settings"]["context"]
        heads = [
            MIXER, Both(f"bits per byte, end of {trained:,}", f"每字节比特数，{trained:,} 末尾"),
            Both(f"at byte {longest:,}", f"第 {longest:,} 字节处"),
        ]  # fmt: skip
        return Table(Both("Length: beyond the training length", "长度：超出训练长度"), heads, rows, _of(body))

    def tracking(self) -> Table | None:
        """Accuracy in tracking a state, at several times the trained length."""
        body = self._body("reproduce-state-tracking-quick")
        if body is None:
            return None
        ordered = sorted(body["rows"], key=lambda r: (r["problem"], -r["accuracy"]))
        rows = [[r["problem"], _code(r["mixer"]), percent(r["accuracy"]), percent(r["chance"])] for r in ordered]
        heads = [Both("problem", "问题"), MIXER, Both("accuracy", "正确率"), Both("by chance", "随机猜测")]
        return Table(Both("State tracking", "状态跟踪"), heads, rows, _of(body))

    def training(self) -> Table | None:
        """Training speed of whole models on a GPU."""
        body = self._body("train-h200")
        if body is None:
            return None
        rows = [
            [_code(r["model"]), r["library"], f"{r['tokens_per_second']:,.0f}", f"{r['peak_gb']:.1f} GB"]
            for r in sorted(body["rows"], key=lambda r: -(r.get("tokens_per_second") or 0))
            if r.get("tokens_per_second")
        ]
        heads = [Both("model", "模型"), Both("library", "库"), Both("tokens/s", "token/秒"), Both("peak memory", "峰值显存")]
        return Table(Both("Training", "训练"), heads, rows, f"{body['card']}, {body['runs'][-1]['date']}")

    def decoding(self) -> Table | None:
        """Time of a token and bytes of state of whole models on a GPU."""
        body = self._body("decode-h200")
        if body is None:
            return None
        rows = [
            [_code(r["model"]), r["size"], f"{r['context']:,}", f"{r['step_ms']:.3f}", memory(r["state_bytes"])]
            for r in body["rows"]
            if r["library"] == "linattn" and r.get("step_ms") and r.get("state_bytes") and r["rows"] == 1
        ]
        heads = [
            Both("model", "模型"), Both("parameters", "参数量"), Both("tokens before", "此前的 token 数"),
            Both("ms per token", "毫秒/token"), Both("state", "状态"),
        ]  # fmt: skip
        return Table(Both("Decoding", "解码"), heads, rows, f"{body['card']}, {body['runs'][-1]['date']}")


def period(layers: str) -> str:
    """The shortest pattern that repeats to ``layers``."""
    names = pattern.parse(layers, "layers")
    length = next(n for n in range(1, len(names) + 1) if len(names) % n == 0 and names[:n] * (len(names) // n) == names)
    return pattern.written(names[:length])


def _code(name: str) -> str:
    return f"<code>{name}</code>"


def _codes(names: str) -> str:
    """List of names; lines break only between names."""
    between = ',</code> <code class="kept">'
    return f'<code class="kept">{names.replace(", ", between)}</code>'


def _of(body: dict[str, Any]) -> str:
    machine = body["machines"][0]
    return f"<code>{body['command']}</code>, {machine['accelerator'] or machine['cpu']}, {str(body['created'])[:10]}"
