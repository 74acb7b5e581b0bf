"""Program that writes the tables of both READMEs and of docs from the measured data: ``python benchmarks/tables.py``.

A table stands between ``<!-- from benchmarks/results/FILE.json -->`` and ``<!-- end -->``; without the file there is none.
``summary of`` in place of ``from`` makes the front page's six rows of a GPU's passes.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from linattn.bench.gpu.cases import DECODE, DECODE_SHAPES, FAMILIES, FIRST, GRAPHED, PASSES, SHAPES, SHORT, START_SHAPE, STEPS, Case
from linattn.compare.tasks import load
from linattn.report.words import memory, tokens
from linattn.reproduce import variants

ROOT = Path(__file__).parents[1]
MARKED = re.compile(r"(<!-- (?:from|summary of) (benchmarks/results/([a-z]+)-([\w-]+)\.json) -->\n).*?(?=<!-- end -->)", re.S)
PAGES = [f"{page}{language}.md" for page in ("README", "docs/studies", "docs/benchmarks") for language in ("", ".zh")]
TITLES = {
    "en": {
        "ops-cpu": ("compared with", "pass", "tokens", "linattn, ms", "the other, ms", "median of ratios", "aim"),
        "ops": ("milliseconds: linattn · fla", "pass", "peak memory, MB", "first call (cached), s"),
        "front": ("recurrence of", "forward, ms", "best peer, ms", "speed-up", "forward+backward, ms", "best peer, ms", "speed-up"),
        "steps": ("one token, microseconds: linattn · fla",),
        "graphed": ("in a CUDA graph, microseconds: linattn · fla", "pass"),
        "train-cpu": ("training", "dtype", "tokens/s", "relative to Llama", "parameters, M"),
        "train": ("model", "tokens/s", "compiled, tokens/s", "first step, s", "peak memory, GB", "parameters, M"),
        "vision": ("thousand tokens a second", "pass"),
        "decode": ("model", "rows", "tokens read before", "a token, ms", "reading weights and state once, ms", "through generate, ms"),
        "decode-cpu": ("130M, one row", "dtype"),
        "parallel": ("one sequence on {cards} cards", "tokens", "one card, ms", "all, ms", "efficiency", "memory of a card beside one's"),
        "sharded": ("model", "cards", "cards of a sequence", "sequences", "tokens of one", "tokens/s", "peak memory, GB"),
        "in a graph": "in a CUDA graph",
        "quantised": ("one row", "weights", "a token, ms", "times bfloat16", "bytes read, MB", "of this machine's reading speed"),
        "llama.cpp": ("the same weights", "linattn", "a token, ms", "llama.cpp", "a token, ms", "llama.cpp's time over linattn's"),
        "speculate": ("decoding", "rows", "text", "times plain decoding", "least of the runs", "tokens of drafts accepted"),
        "patterns": ("mixer", "patterns", "largest error beside token by token", "states depend on rejected tokens"),
        "quality": ("model", "bfloat16", "int8", "int4", "int4, calibrated"),
        "run": "{card}, {cores} cores, torch {torch}, {date}: `{command}`.",
        "compilers": ("a step, ms", "dtype"),
        "measured": "{card}, torch {torch}, triton {triton}, fla-core {fla} (beside the selective scan mamba-ssm {mamba}), {date}. "
        "Softmax is torch's flash attention.",
        "digits": ("mixer", "test accuracy"),
        "recommend": ("mixer", "HR@10", "NDCG@10"),
        "reverse": ("mixer", "written backwards without a mistake: lengths between those learned", "longer ones"),
        "sort": ("mixer", "sorted without a mistake: lengths between those learned", "longer ones"),
        "translate": ("mixer", "bits per character"),
        "recall": ("mixer", "state at width 128", "recall, width {dims}", "forgetting, {dims}"),
        "mad": {"fuzzy recall": "fuzzy recall", "selective copying": "selective copying", "compression": "compression"},
        "copying": ("mixer", "state", "induction head, {induction} tokens", "whole strings copied, {copying} letters"),
        "extrapolation": ("mixer", "bits per byte in the first {context}", "up to byte {length}, past carried", "past forgotten"),
        "hybrids": ("layers of softmax", "recall", "bits per byte", "kept of {context} tokens", "one more token, ms"),
        "precision": ("state rounded after each token to", "error after {tokens} tokens, {rules}", "recall: {mixers}"),
        "brought": ("what comes back", "bytes", "from the GPU's memory, ms", "from main memory", "from disk"),
        "cache": "softmax's cache of {tokens} tokens",
        "state": "state of {mixer}",
        "losses": ("model", "learning rate at width {first}", "bits per byte, {sizes}", "tokens/s, {sizes}", "seconds, {sizes}"),
        "trained": "`{command}`: {card}, torch {torch}, {date}. {tokens:.1f} million tokens in windows of {context:,}, {batch:,} a step.",
        "order": "From the lowest loss on, {size}: {names}.",
        "curves": "![Bits per byte against tokens, seconds and parameters](images/losses.svg)",
        "one seed": "`{command}`: {cpu}, torch {torch}, {date}.",
        "compared": "`{command}`: the mean of {seeds} seeds ± standard deviation, {cpu}, torch {torch}, {date}.",
    },
    "zh": {
        "ops-cpu": ("对比对象", "计算", "token 数", "linattn（毫秒）", "对方（毫秒）", "比值中位数", "目标"),
        "ops": ("毫秒：linattn · fla", "计算", "峰值显存（MB）", "首次调用（有缓存时，秒）"),
        "front": ("递推式", "前向（毫秒）", "最快的其他库（毫秒）", "倍数", "前向+反向（毫秒）", "最快的其他库（毫秒）", "倍数"),
        "steps": ("单个 token（微秒）：linattn · fla",),
        "graphed": ("CUDA 图中（微秒）：linattn · fla", "计算"),
        "train-cpu": ("训练", "dtype", "token/秒", "与 Llama 之比", "参数（百万）"),
        "train": ("模型", "token/秒", "编译后 token/秒", "第一步（秒）", "峰值显存（GB）", "参数（百万）"),
        "vision": ("千 token/秒", "计算"),
        "decode-cpu": ("130M，一行", "dtype"),
        "parallel": ("{cards} 张卡共享一条序列", "token 数", "单卡（毫秒）", "多卡（毫秒）", "效率", "每卡显存与单卡之比"),
        "sharded": ("模型", "卡数", "每条序列的卡数", "序列数", "序列长度（token）", "token/秒", "峰值显存（GB）"),
        "in a graph": "CUDA 图中",
        "compilers": ("每步（毫秒）", "dtype"),
        "decode": ("模型", "行数", "已读 token 数", "每 token（毫秒）", "权重与状态各读一遍（毫秒）", "经 generate（毫秒）"),
        "quantised": ("一行", "权重", "每 token（毫秒）", "bfloat16 的倍数", "读取字节（MB）", "占本机读取速度"),
        "llama.cpp": ("相同的权重", "linattn", "每 token（毫秒）", "llama.cpp", "每 token（毫秒）", "llama.cpp 用时与 linattn 之比"),
        "speculate": ("解码", "行数", "文本", "普通解码的倍数", "各次中最低", "被接受的草稿 token"),
        "patterns": ("混合层", "模式数", "与逐 token 相比的最大误差", "状态依赖被拒绝的 token"),
        "quality": ("模型", "bfloat16", "int8", "int4", "int4，经校准"),
        "run": "{card}，{cores} 核，torch {torch}，{date}：`{command}`。",
        "measured": "{card}，torch {torch}，triton {triton}，fla-core {fla}（选择性扫描一行对比 mamba-ssm {mamba}），{date}。"
        "softmax 一行是 torch 的 flash attention。",
        "digits": ("混合层", "测试准确率"),
        "recommend": ("混合层", "HR@10", "NDCG@10"),
        "reverse": ("混合层", "倒写全对：长度介于学过的之间", "更长"),
        "sort": ("混合层", "排序全对：长度介于学过的之间", "更长"),
        "translate": ("混合层", "每字符比特数"),
        "values": {"refuses": "拒绝", "timed out": "超时", "best that is possible": "理论最优", "by popularity": "按热度排序"},
        "recall": ("混合层", "宽度 128 时的状态", "回忆，宽度 {dims}", "键被改写，{dims}"),
        "mad": {"fuzzy recall": "模糊回忆", "selective copying": "选择性复制", "compression": "压缩"},
        "copying": ("混合层", "状态", "归纳头，{induction} 个 token", "整串复制，{copying} 个字母"),
        "extrapolation": ("混合层", "前 {context} 字节的每字节比特数", "至第 {length} 字节，状态接续", "每段清空"),
        "hybrids": ("softmax 层", "回忆", "每字节比特数", "读过 {context} 个 token 后的缓存", "再写一个 token（毫秒）"),
        "precision": ("每个 token 后状态舍入为", "{tokens} 个 token 后的误差，{rules}", "回忆：{mixers}"),
        "brought": ("取回的内容", "字节", "从显存（毫秒）", "从内存", "从磁盘"),
        "cache": "softmax 的缓存，{tokens} 个 token",
        "state": "{mixer} 的状态",
        "losses": ("模型", "宽度 {first} 时的学习率", "每字节比特数，{sizes}", "token/秒，{sizes}", "秒，{sizes}"),
        "trained": "`{command}`：{card}，torch {torch}，{date}。共 {tokens:.1f} 百万 token，窗口 {context:,}，每步 {batch:,}。",
        "order": "损失由低到高，{size}：{names}。",
        "curves": "![每字节比特数随 token 数、秒数与参数量的变化](images/losses.svg)",
        "one seed": "`{command}`：{cpu}，torch {torch}，{date}。",
        "compared": "`{command}`：{seeds} 个种子的均值 ± 标准差，{cpu}，torch {torch}，{date}。",
    },
}


def markdown(titles: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Format a table of cells."""
    titles = tuple(titles)
    lines = [f"| {' | '.join(titles)} |", f"|{'---|' * len(titles)}", *(f"| {' | '.join(cells)} |" for cells in rows)]
    return "\n".join(lines) + "\n"


def cpu(body: dict, words: dict) -> str:
    """Rows that have a target."""
    return markdown(
        words["ops-cpu"],
        (
            (
                r["what"],
                r["mode"],
                str(r["tokens"]),
                f"{r['ours_ms']:.0f}",
                f"{r['theirs_ms']:.0f}",
                f"{r['ratio']:.2f}",
                f"{r['target']:.2g}",
            )
            for r in body["rows"]
            if r["target"] is not None
        ),
    )


def trained_on_cpu(body: dict, words: dict) -> str:
    """Line for each model and dtype."""
    return markdown(
        words["train-cpu"],
        (
            (
                f"{r['library']} {r['model']}",
                r["dtype"],
                f"{r['tokens_per_second']:,.0f}",
                f"{r['times_llama']:.2f}",
                f"{r['parameters'] / 1e6:.1f}",
            )
            for r in body["rows"]
        ),
    )


PEERS = {"selective_scan": "mamba-ssm"}  # of a family; fla, else


class Figures:
    """Rows of one card by library and case."""

    def __init__(self, body: dict) -> None:
        key = ("library", "family", "shape", "mode", "decay", "decay_dtype")
        self.rows = {tuple(row[name] for name in key): row for row in body["rows"]}

    def pair(self, case: Case, show: Callable[[dict], str]) -> str:
        """Our figure and a peer's (for softmax torch's alone), "" if neither was measured."""
        names = ("torch",) if case.family == "softmax" else ("linattn", PEERS.get(case.family, "fla"))
        cells = [self.cell(name, case, show) for name in names]
        return " · ".join(cell or "–" for cell in cells) if any(cells) else ""

    def row(self, library: str, case: Case) -> dict | None:
        return self.rows.get((library, case.family, str(case.shape), case.mode, case.decay, case.decay_dtype))

    def cell(self, library: str, case: Case, show: Callable[[dict], str]) -> str:
        """Result of ``show`` for one row, or its failure, or ""."""
        row = self.row(library, case)
        return "" if row is None else row["failure"] if row["ms"] is None else show(row)


def gpu(body: dict, words: dict) -> str:
    """Passes over whole sequences, then single tokens."""
    figures = Figures(body)
    first, mode, peak, call = words["ops"]
    passes = []
    for family in FAMILIES:
        for name in PASSES:
            cells = [figures.pair(Case.of(family, shape, name), lambda r: f"{r['ms']:.2f}") for shape in SHAPES]
            memory = begun = ""
            if name == PASSES[1]:
                memory = figures.pair(Case.of(family, SHAPES[0], name), lambda r: f"{r['peak_mb']:.0f}")
                begun = figures.cell(
                    "linattn", Case.of(family, START_SHAPE, FIRST), lambda r: f"{r['ms'] / 1e3:.1f} ({r['warm_ms'] / 1e3:.1f})"
                )
            if any(cells):
                passes.append((family, name, *cells, memory, begun))
    steps = []
    for family in STEPS:
        cells = [figures.pair(Case.of(family, shape, DECODE[0]), lambda r: f"{r['ms'] * 1e3:.1f}") for shape in DECODE_SHAPES]
        if any(cells):
            steps.append((family, *cells))
    graphed = [(f, m, *_row(figures, f, m)) for f in FAMILIES for m in GRAPHED if any(_row(figures, f, m))]
    tables = [markdown((first, mode, *map(str, SHAPES), peak, call), passes)] if passes else []
    tables += [markdown((*words["steps"], *(f"B{s.B} H{s.H} D{s.D}" for s in DECODE_SHAPES)), steps)] if steps else []
    tables += [markdown((*words["graphed"], *map(str, SHORT)), graphed)] if graphed else []
    return f"{_measured(body, words)}\n\n" + "\n".join(tables)


def _row(figures: Figures, family: str, mode: str) -> list[str]:
    """Microseconds of the short shapes."""
    return [figures.pair(Case.of(family, shape, mode), lambda r: f"{r['ms'] * 1e3:.0f}") for shape in SHORT]


def _measured(body: dict, words: dict) -> str:
    last = body["runs"][-1]
    versions = {row["library"]: row["version"] for row in body["rows"]}
    fla, mamba = (versions.get(name, "–") for name in ("fla", "mamba-ssm"))
    return words["measured"].format(card=body["card"], torch=last["torch"], triton=last["triton"], fla=fla, mamba=mamba, date=last["date"])


def train(body: dict, words: dict) -> str:
    """Line for each model, with torch.compile's figure beside it."""
    models: dict[tuple[str, str], dict[bool, dict]] = {}
    for row in body["rows"]:
        models.setdefault((row["library"], row["model"]), {})[row["compiled"]] = row
    return markdown(words["train"], (_trained(" ".join(name), both) for name, both in models.items()))


def _trained(name: str, both: dict[bool, dict]) -> tuple[str, ...]:
    def speed(row: dict | None) -> str:
        if row is None:
            return "–"
        return row["failure"] if row["tokens_per_second"] is None else f"{row['tokens_per_second']:,.0f}"

    eager, compiled = both.get(False), both.get(True)
    done = next((row for row in (eager, compiled) if row and row["tokens_per_second"] is not None), None)
    rest = (f"{done['first_step_s']:.0f}", f"{done['peak_gb']:.1f}", f"{done['parameters'] / 1e6:.0f}") if done else ("–",) * 3
    return (name, speed(eager), speed(compiled), *rest)


def vision(body: dict, words: dict) -> str:
    """Line for each mixer and pass, a column for each grid of tokens."""
    sides = sorted({row["side"] for row in body["rows"]})
    lines: dict[tuple[str, str], dict[int, dict]] = {}
    for row in body["rows"]:
        lines.setdefault((row["mode"], row["mixer"]), {})[row["side"]] = row
    cells = (
        (mixer, mode, *(f"{found[n]['tokens_per_second'] / 1e3:,.0f}" if n in found else "" for n in sides))
        for (mode, mixer), found in lines.items()
    )
    return markdown((*words["vision"], *(f"{n}×{n}" for n in sides)), cells)


def parallel(body: dict, words: dict) -> str:
    """Line for each recurrence and length of a sequence on several cards."""
    cells = []
    for r in sorted(body["rows"], key=lambda r: (r["library"] != "linattn", r["graph"])):
        name = f"{r['library']}, {FRONT.get(r['family'], r['family'])}" + f", {words['in a graph']}" * r["graph"]
        cells.append((name, f"{r['tokens']:,}", f"{r['one_ms']:.2f}", f"{r['all_ms']:.2f}", f"{r['efficiency']:.0%}", f"{r['memory']:.2f}"))
    return markdown((words["parallel"][0].format(**body["rows"][0]), *words["parallel"][1:]), cells)


def sharded(body: dict, words: dict) -> str:
    """Line for each training of a model with sharded parameters."""
    cells = []
    for r in body["rows"]:
        figures = (f"{r['context']:,}", f"{r['tokens_per_second']:,.0f}", f"{r['peak_gb']:.0f}")
        cells.append((f"{r['model']} {r['mixer']}", str(r["cards"]), str(r["cp"]), str(r["batch"]), *figures))
    return markdown(words["sharded"], cells)


def decode(body: dict, words: dict) -> str:
    """Line for each model, number of rows and length of the text read before."""
    cells = []
    for r in body["rows"]:
        if r.get("what") == "times" and r["library"] == "linattn":
            name, step, floor = f"{r['model']} {r['size']}", f"{r['step_ms']:.3f}", f"{r['floor_ms']:.3f} ({r['of_floor']:.0%})"
            cells.append((name, str(r["rows"]), f"{r['context']:,}", step, floor, f"{r['generate_ms']:.3f}"))
    return markdown(words["decode"], cells)


def decode_on_cpu(body: dict, words: dict) -> str:
    """Line for each model, dtype and length of the text read before; others are measured through ``generate`` alone."""
    cells = []
    for r in body["rows"]:
        if r["what"] == "times":
            own = (f"{r['step_ms']:.1f}", f"{r['floor_ms']:.1f} ({r['of_floor']:.0%})") if "step_ms" in r else ("", "")
            cells.append((f"{r['library']} {r['model']}", r["dtype"], f"{r['context']:,}", *own, f"{r['generate_ms']:.1f}"))
    return markdown((*words["decode-cpu"], *words["decode"][2:]), cells)


def runs(body: dict, words: dict) -> str:
    """Line for each run: machine, versions and command."""
    told = ({**run, "card": run["cpu"] if run["card"] == "cpu" else run["card"]} for run in body["runs"])
    return "\n".join(words["run"].format(**run) for run in told) + "\n\n"


def quantised(body: dict, words: dict) -> str:
    """Line for each model and format, and for each pair with llama.cpp."""
    steps = [
        (
            f"{r['model']} {r['size']}",
            r["to"] if r["group"] is None else f"{r['to']}, {r['group']}",
            f"{r['step_ms']:.3g}",
            f"{r['ratio']:.2f}",
            f"{r['weights_bytes'] / 1e6:,.0f}",
            f"{r['of_bandwidth']:.0%}",
        )
        for r in body["rows"]
        if r["what"] == "step"
    ]
    beside = [
        (f"{r['model']} {r['size']}", r["to"], f"{r['step_ms']:.3g}", r["gguf"], f"{r['theirs_ms']:.3g}", f"{r['ratio']:.2f}")
        for r in body["rows"]
        if r["what"] == "llama.cpp"
    ]
    text = runs(body, words) + (markdown(words["quantised"], steps) if steps else "")
    return text + ("\n" if steps and beside else "") + (markdown(words["llama.cpp"], beside) if beside else "")


def speculated(body: dict, words: dict) -> str:
    """Line for each model, batch and text, and for each mixer of random patterns."""
    speeds = [
        (
            f"{r['mixer']} {r['size']}, {r['dtype']}",
            str(r["rows"]),
            r["text"],
            f"{r['speedup']:.2f}",
            f"{r['least']:.2f}",
            f"{r['accepted']:,} / {r['drafted']:,}",
        )
        for r in body["rows"]
        if r["what"] == "speed"
    ]
    drawn = [
        (r["mixer"], f"{r['patterns']:,}", f"{r['error']:.1e}", "no" if r["bits"] else "yes")
        for r in body["rows"]
        if r["what"] == "patterns"
    ]
    text = runs(body, words) + (markdown(words["speculate"], speeds) if speeds else "")
    return text + ("\n" if speeds and drawn else "") + (markdown(words["patterns"], drawn) if drawn else "")


def quality(body: dict, words: dict) -> str:
    """Line for each model: bits per byte, and how much more than in bfloat16."""
    found: dict[str, dict[tuple[str, bool], str]] = {}
    for r in body["rows"]:
        more = "" if r["to"] == "bfloat16" else f" ({r['more']:+.2%})"
        own = found.setdefault(f"{r['model']}, {r['parameters'] / 1e6:,.1f} M", {})
        own[r["to"], r["calibrated"]] = f"{r['bits_per_byte']:.4f}{more}"
    columns = ("bfloat16", False), ("int8", False), ("int4", False), ("int4", True)
    rows = ((name, *(own.get(column, "") for column in columns)) for name, own in found.items())
    return runs(body, words) + markdown(words["quality"], rows)


def compilers(body: dict, words: dict) -> str:
    """Line for each model and dtype, a column for each way to compile its step."""
    ways = list(dict.fromkeys(row["way"] for row in body["rows"]))
    lines: dict[tuple[str, ...], dict[str, dict]] = {}
    for row in body["rows"]:
        lines.setdefault((f"{row['model']} {row['size']}", row["dtype"]), {})[row["way"]] = row
    shown = {name: [f"{row[way]['step_ms']:.3g}" if "step_ms" in row.get(way, {}) else "–" for way in ways] for name, row in lines.items()}
    return markdown((*words["compilers"], *ways), ((*name, *cells) for name, cells in shown.items()))


def compared(body: dict, words: dict) -> str:
    """Scores of a task without its speeds: a line for each mixer, and for references that are no model."""
    judged = [f for f in load(body["task"]).figures if not f.key.endswith("_per_second")]
    rows = [(m["name"], *(f.cell(m) for f in judged)) for m in body["mixers"]]
    known = body["data"].get("references", {})
    rows += [(name, *(f.write(told[f.key]) for f in judged)) for name, told in known.items()]
    facts = {**body["machine"], "command": body["command"], "seeds": body["options"]["seeds"], "date": body["created"][:10]}
    return words["compared" if facts["seeds"] > 1 else "one seed"].format(**facts) + "\n\n" + markdown(words[body["task"]], rows)


def recall(body: dict, words: dict) -> str:
    """Line for each mixer: the share of right answers, over the widths if there are several."""
    found = {(row["task"], row["dim"], row["mixer"]): row for row in body["rows"]}
    dims = {task: sorted({dim for t, dim, _ in found if t == task}) for task in ("mqar", "forgetting", *words["mad"])}
    cells = (
        (
            variants.label(mixer),
            memory(found["mqar", 128, mixer]["state_bytes"]),
            *(" · ".join(f"{found[task, dim, mixer]['accuracy']:.2f}" for dim in of) for task, of in dims.items()),
        )
        for mixer in dict.fromkeys(row["mixer"] for row in body["rows"])
    )
    name, state, *swept = words["recall"]
    swept = [title.format(dims=" · ".join(map(str, of))) for title, of in zip(swept, dims.values(), strict=False)]
    return _one_seed(body, words) + markdown((name, state, *swept, *words["mad"].values()), cells)


def copying(body: dict, words: dict) -> str:
    """Line for each mixer: right answers from the longest length of the training on; for induction at every other length."""
    curves = {(row["task"], row["mixer"]): {point["length"]: point["whole"] for point in row["curve"]} for row in body["rows"]}
    state = {row["mixer"]: row["state_bytes"] for row in body["rows"] if row["task"] == "induction"}
    shown = {}
    for task, every in (("induction", 2), ("copying", 1)):
        longest = max(body["settings"]["train"][task])
        shown[task] = [n for n in body["settings"]["test"][task] if n >= longest][::every]

    def shares(mixer: str) -> Iterable[str]:
        for task, lengths in shown.items():
            found = (curves[task, mixer][n] for n in lengths)
            yield " · ".join("–" if share is None else f"{share:.2f}" for share in found)

    cells = ((variants.label(mixer), memory(size), *shares(mixer)) for mixer, size in state.items())
    lengths = {task: " · ".join(map(tokens, of)) for task, of in shown.items()}
    return _one_seed(body, words) + markdown((title.format(**lengths) for title in words["copying"]), cells)


def extrapolation(body: dict, words: dict) -> str:
    """Line for each mixer: bits per byte at the lengths of the training, and far beyond them."""
    cells = ((variants.label(r["mixer"]), *(f"{r[name]:.3f}" for name in ("learned", "carried", "fresh"))) for r in body["rows"])
    lengths = {name: f"{body['settings'][name]:,}" for name in ("context", "length")}
    return _one_seed(body, words) + markdown((title.format(**lengths) for title in words["extrapolation"]), cells)


def hybrids(body: dict, words: dict) -> str:
    """Line for each share of softmax."""
    cells = (
        (f"{row['share']}", f"{row['recall']:.2f}", f"{row['bits_per_byte']:.3f}", memory(row["state_bytes"]), f"{row['decode_ms']:.3g}")
        for row in body["rows"]
    )
    context = f"{body['settings']['context']:,}"
    return _one_seed(body, words) + markdown((title.format(context=context) for title in words["hybrids"]), cells)


def precision(body: dict, words: dict) -> str:
    """Line for each dtype, and one for each cache and state that is restored."""
    rounded = [row for row in body["rows"] if row.get("every") == 1]
    errors = {(row["mixer"], row["dtype"]): row["error"] for row in rounded if row.get("error") is not None}
    recalled = {(row["mixer"], row["dtype"]): row["recall"] for row in rounded if row.get("recall") is not None}
    rules, mixers = (list(dict.fromkeys(mixer for mixer, _ in of)) for of in (errors, recalled))
    cells = (
        (dtype, " · ".join(f"{errors[rule, dtype]:.1e}" for rule in rules), " · ".join(f"{recalled[m, dtype]:.3f}" for m in mixers))
        for dtype in dict.fromkeys(row["dtype"] for row in rounded)
    )
    facts = {"tokens": f"{body['settings']['length']:,}", "rules": " · ".join(rules), "mixers": " · ".join(mixers)}
    first = markdown((title.format(**facts) for title in words["precision"]), cells)
    lines = []
    for row in body["rows"]:
        if row.get("bytes") is not None:
            name = words["cache" if row["mixer"] == "softmax" else "state"].format(tokens=f"{row['tokens']:,}", mixer=row["mixer"])
            lines.append((name, memory(row["bytes"]), *(f"{1e3 * row[place]:.3g}" for place in ("accelerator", "memory", "disk"))))
    return _one_seed(body, words) + first + "\n" + markdown(words["brought"], lines)


def losses(body: dict, words: dict) -> str:
    """Row for each model: its learning rate, and at each width the final loss, the speed and the time."""
    rows = {(r["model"], r["dim"]): r for r in body["rows"] if r["steps"] == body["steps"]}
    dims, tokens = sorted({dim for _, dim in rows}), body["steps"] * body["batch_size"] * body["context"]
    sizes = [f"{next(r['parameters'] for (_, d), r in rows.items() if d == dim) / 1e6:.0f}M" for dim in dims]
    lines = []
    for name in body["mixers"]:
        there = [rows.get((name, dim)) for dim in dims]
        done = [None if r is None or "failure" in r else r for r in there]
        figures = (
            lambda r: f"{r['history'][-1]['validation_bits_per_byte']:.3f}",
            lambda r: f"{r['tokens_per_second'] / 1e3:,.0f}k",
            lambda r: f"{tokens / r['tokens_per_second']:.0f}",
        )
        rate = "–" if there[0] is None else f"{there[0]['learning_rate']:g}"
        lines.append((name, rate, *(" · ".join("–" if r is None else write(r) for r in done) for write in figures)))
    titles = [title.format(first=dims[0], sizes=" · ".join(sizes)) for title in words["losses"]]
    orders = []
    for dim, size in zip(dims, sizes, strict=True):
        ranked = [r for (_, d), r in rows.items() if d == dim and "failure" not in r]
        names = ", ".join(r["model"] for r in sorted(ranked, key=lambda r: r["history"][-1]["validation_bits_per_byte"]))
        orders.append(words["order"].format(size=size, names=names))
    facts = {"command": body["command"], "card": body["card"], "torch": body["run"]["torch"], "date": body["date"]}
    facts |= {"tokens": tokens / 1e6, "context": body["context"], "batch": body["batch_size"] * body["context"]}
    return "\n\n".join([words["trained"].format(**facts), markdown(titles, lines) + "\n" + " ".join(orders), words["curves"]]) + "\n"


def _one_seed(body: dict, words: dict) -> str:
    facts = {**body["machines"][0], "cpu": body["machines"][0]["accelerator"], "command": body["command"], "date": body["created"][:10]}
    return words["one seed"].format(**facts) + "\n\n"


STUDIES = {"recall": recall, "copying": copying, "extrapolation": extrapolation, "hybrids": hybrids, "precision": precision}


def reproduced(body: dict, words: dict) -> str:
    return STUDIES[body["study"]](body, words)


def table(file: str, suite: str, card: str, words: dict) -> str:
    """Table of the results in ``file``."""
    path = ROOT / file
    if not path.is_file():
        return ""
    body = json.loads(path.read_text(encoding="utf-8"))
    suites = {
        "train": train,
        "compare": compared,
        "reproduce": reproduced,
        "vision": vision,
        "decode": decode,
        "front": summary,
        "losses": losses,
        "parallel": parallel,
        "sharded": sharded,
        "quantised": quantised,
        "speculate": speculated,
        "quality": quality,
        "compilers": compilers,
    }
    on_cpu = {"train": trained_on_cpu, "ops": cpu, "decode": decode_on_cpu}
    make = (suites | on_cpu if card == "cpu" else suites).get(suite, gpu)
    text = make(body, words)
    for value, told in words.get("values", {}).items():  # of cells; no title has them
        text = text.replace(value, told)
    return text


FRONT = {"constant": "RetNet", "channel": "GLA", "delta": "DeltaNet", "kda": "KDA", "erase": "RWKV-7", "selective_scan": "Mamba"}


def summary(body: dict, words: dict) -> str:
    """Row of the front page for each family: our time and that of the fastest other library, forward and with gradients."""
    figures = Figures(body)
    others = sorted({row["library"] for row in body["rows"]} - {"linattn"})
    lines = []
    for family, name in FRONT.items():
        cells = []
        for mode in PASSES:
            case = Case.of(family, SHAPES[0], mode)
            ours, *theirs = [(figures.row(library, case) or {}).get("ms") for library in ("linattn", *others)]
            best, library = min((ms, library) for ms, library in zip(theirs, others, strict=True) if ms is not None)
            cells += [f"{ours:.2f}", f"{best:.2f} ({library})", f"{best / ours:.1f}"]
        lines.append((name, *cells))
    return f"{_measured(body, words)}\n\n{markdown(words['front'], lines)}"


def filled(name: str) -> str:
    """Text of the page ``name`` with its tables renewed."""
    text, titles = (ROOT / name).read_text(encoding="utf-8"), TITLES["zh" if name.endswith(".zh.md") else "en"]
    return MARKED.sub(lambda found: found[1] + table(found[2], "front" if "<!-- summary" in found[1] else found[3], found[4], titles), text)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    for name in PAGES:
        (ROOT / name).write_text(filled(name), encoding="utf-8")
