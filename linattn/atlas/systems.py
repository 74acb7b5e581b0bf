"""Pages of all registered systems, made from the registry, the mixer and its measurements."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from html import escape
from typing import TYPE_CHECKING

from linattn.atlas import measured, sentence
from linattn.atlas.cell import cell, sentences
from linattn.atlas.chinese import both, equation
from linattn.atlas.draw import mask
from linattn.atlas.inspection import FAMILIES, Inspection
from linattn.atlas.page import Entry, Page, figure, rounded
from linattn.atlas.text import Both, labelled, spoken
from linattn.mixers import Cost, cost
from linattn.mixers.errors import measured_errors
from linattn.report.words import figure as three
from linattn.report.words import memory, times

if TYPE_CHECKING:
    from linattn.atlas.build import Atlas
    from linattn.mixers.registry import Info

ENTRY = Entry(
    "systems/index.html",
    Both("Systems", "方法"),
    Both(
        "A page for every system: equation, cell, matrix, state, code, cost, and what it was checked against.",
        "每种方法一页：公式、单元、矩阵、状态、代码、开销，以及拿什么验证过。",
    ),
)
FAMILY = {
    "none": Both("Nothing fades", "不衰减"),
    "constant": Both("Fades at a fixed rate", "固定衰减"),
    "head": Both("Fades per head", "逐头衰减"),
    "channel": Both("Fades per channel", "逐通道衰减"),
    "erase": Both("Erases", "会擦除"),
    "scores": Both("Keeps every token", "保留每个 token"),
    "other": Both("Rules of its own", "自有规则"),
}
ABOUT = {
    "none": Both(
        "The state is a plain sum: nothing can be stressed and nothing forgotten.", "状态只是求和：既不能突出什么，也不会忘记什么。"
    ),
    "constant": Both("What is old weighs less, at a rate that no token can change.", "越旧的越轻，速率与内容无关。"),
    "head": Both("Each token says how much of the past a head keeps.", "每个 token 决定一个头保留多少过去。"),
    "channel": Both("Each token says for every channel of the key how much is kept.", "每个 token 为键的每个通道决定保留多少。"),
    "erase": Both("Before it writes, it takes away what the same key held.", "写入之前，先抹掉同一个键上的旧内容。"),
    "scores": Both(
        "The past is a list that grows; each query is compared with all of it.", "过去是一张不断变长的表，每个查询都与全表比较。"
    ),
    "other": Both(
        "Its update is no case of the one recurrence; its page says what can be shown.",
        "它的更新不是那个统一递推的特例，页面会说明能展示什么。",
    ),
}
AT_ONCE = Both(
    "All tokens are there at once, the later ones too; nothing is handed from one to the next.",
    "所有 token 同时在场，后文也在内；token 之间不传递任何东西。",
)
FEED_FORWARD = Both(
    "A feed-forward: it works on what each token holds by now, and leaves it to the mixers who reads whom.",
    "前馈层：加工每个 token 此刻所持有的内容；谁读谁，是混合层的事。",
)
DIM, TOKENS = 512, 4096  # of the cost sheet


def pages(atlas: Atlas) -> Iterator[Page]:
    """Make a list of all systems, and one page for each."""
    yield _index(atlas)
    order = list(atlas.names)
    for i, name in enumerate(atlas.each("a page for", order)):
        around = (order[i - 1] if i else None, order[i + 1] if i + 1 < len(order) else None)
        yield _page(atlas, atlas.inspections[name], around)


def _index(atlas: Atlas) -> Page:
    parts = []
    for family in FAMILIES:
        members = sorted((seen for seen in atlas.inspections.values() if seen.family == family), key=lambda x: (x.info.year, x.info.name))
        if members:
            cards = "".join(f'<li><a class="card small" href="{escape(x.info.name)}.html">{spoken(x.title, "b")}'
                            f'<p>{x.info.year or ""} · <code>{escape(x.info.name)}</code></p></a></li>' for x in members)  # fmt: skip
            parts.append(f'<h2 id="{family}">{spoken(FAMILY[family])}</h2>{spoken(ABOUT[family], "p")}<ul class="cards">{cards}</ul>')
    lead = Both(
        f"{len(atlas.inspections)} systems, sorted by what happens to the state before something new is written into it.",
        f"{len(atlas.inspections)} 种方法，按“写入新内容之前，状态发生什么”来分类。",
    )
    return Page(ENTRY.path, ENTRY.name, "\n".join(parts), lead=lead)


def gallery(inspections: Iterable[Inspection], root: str = "") -> str:
    """Show the first matrices of ``inspections``, with family names and links to their pages; ``root`` is the path to the first page."""
    items = "".join(
        f'<li><a href="{root}systems/{x.info.name}.html">{mask(x, 0)}{spoken(x.title, "b")}{spoken(FAMILY[x.family])}</a></li>'
        for x in inspections
        if x.matrix is not None
    )
    return f'<ul class="gallery">{items}</ul>' if items else ""


def _page(atlas: Atlas, seen: Inspection, around: tuple[str | None, str | None]) -> Page:
    i = seen.info
    data: dict[str, object] = {}
    if seen.matrix is not None:
        data["mask"] = mask_data(seen)
    if seen.states is not None:
        data["state"] = state_data(seen)
    parts = [_facts(seen), _equation(i), _cell(seen), _mask(seen), _state(seen), _cost(seen), _checked(seen)]
    parts += [*_measured(atlas, seen), _code(seen), _around(around)]
    return Page(f"systems/{i.name}.html", seen.title, "\n".join(parts), data, lead=about(seen))


def about(seen: Inspection) -> Both:
    """Lead of a page: a description of its kind, or of its family."""
    if seen.info.kind == "feed-forward":
        return FEED_FORWARD
    return AT_ONCE if seen.family == "scores" and not seen.info.causal else ABOUT[seen.family]


def mask_data(seen: Inspection) -> dict[str, object]:
    """Data of the figure "mask"."""
    return {"tokens": sentence.tokens(), "causal": seen.info.causal, "matrix": rounded(seen.matrix)}


def state_data(seen: Inspection) -> dict[str, object]:
    """Data of the figure "state"."""
    assert seen.states is not None
    return {"tokens": sentence.tokens(), "name": seen.states.name, "grows": seen.states.grows, "values": rounded(seen.states.values)}


def _facts(seen: Inspection) -> str:
    i = seen.info
    paper = f"<cite>{escape(i.paper)}</cite>" if i.paper else "–"
    if i.arxiv:
        paper += f' <a href="https://arxiv.org/abs/{escape(i.arxiv)}">arXiv {escape(i.arxiv)}</a>'
    facts = [
        (Both("name", "名称"), f"<code>{escape(i.name)}</code>"),
        (Both("paper", "论文"), paper + (f" ({i.year})" if i.year else "")),
        (Both("family", "类别"), f'<a href="index.html#{seen.family}">{spoken(FAMILY[seen.family])}</a>'),
        (Both("in Python", "在 Python 中"), f'<code>linattn.mixers.create("{escape(i.name)}", dim=512)</code>'),
    ]
    return _listed(facts)


def _listed(facts: list[tuple[Both, str]]) -> str:
    return '<dl class="facts">' + "".join(f"<dt>{spoken(k)}</dt><dd>{v}</dd>" for k, v in facts) + "</dl>"


def _equation(info: Info) -> str:
    """MathML of the equation; the source for a plugin's equation outside the subset."""
    try:
        shown = spoken(Both(*(rf"\[{words}\]" for words in equation(info.equation, info.chinese))), "div") if info.equation else ""
    except ValueError:
        shown = f"<code>{escape(info.equation)}</code>"
    return f'<div class="equation" tabindex="0" role="group" {labelled(Both("Equation", "公式"))}>{shown}</div>' if shown else ""


def _section(key: str, title: Both, *parts: str) -> str:
    return f'<section id="{key}"><h2>{spoken(title)}</h2>{"".join(parts)}</section>'


def _note(words: Both) -> str:
    return f'<div class="note">{spoken(words, "p")}</div>'


def _cell(seen: Inspection) -> str:
    if seen.spec is None:
        why = seen.missing["spec"]
        told_html = _note(Both(f"This is no case of the one recurrence: {why.en}.", f"这不是那个统一递推的特例：{why.zh}。"))
    else:
        told_html = '<ul class="said">' + "".join(f"<li>{spoken(s)}</li>" for s in sentences(seen.spec)) + "</ul>"
    title = Both("The cell", "单元")
    drawing = f'<figure class="drawn"><div class="wide" tabindex="0" role="group" {labelled(title)}>{cell(seen)}</div></figure>'
    return _section("cell", title, drawing, told_html)


def _mask(seen: Inspection) -> str:
    title = Both("Who reads whom", "谁读了谁")
    if seen.matrix is None:
        why = seen.missing["matrix"]
        return _section("mask", title, _note(Both(f"There is no such matrix: {why.en}.", f"没有这样的矩阵：{why.zh}。")))
    heads = Both(
        f"Heads 1 to {len(seen.matrix)} of {seen.heads}." if seen.heads > len(seen.matrix) else f"All heads: {seen.heads}.",
        f"共 {seen.heads} 个头，显示前 {len(seen.matrix)} 个。" if seen.heads > len(seen.matrix) else f"共 {seen.heads} 个头。",
    )
    grid = seen.info.kind == "grid"
    cross = seen.info.kind == "cross"
    how = Both(
        "A row is an output, a column the token whose value it reads. "
        + ("The twelve tokens lie on a grid of 3 by 4. " if grid else "The sentence looks at itself as its context. " if cross else "")
        + f"The mixer is as it was created, before any training. {heads.en}",
        "一行是一个输出，一列是被读取其值的 token。"
        + ("十二个 token 排成 3 行 4 列。" if grid else "句子以自身为上下文。" if cross else "")
        + f"权重是刚创建时的样子，未经训练。{heads.zh}",
    )
    return _section("mask", title, figure("mask", "mask", caption=how))


def _state(seen: Inspection) -> str:
    title = Both("What it remembers", "它记住了什么")
    s = seen.states
    if s is None:
        why = seen.missing.get("states", Both("it keeps no numbers", "它不保存数值"))
        return _section("state", title, _note(Both(f"There is no state to show: {why.en}.", f"没有可展示的状态：{why.zh}。")))
    shape = "×".join(map(str, s.shape))
    rows, cols = len(s.values[-1][0]), len(s.values[-1][0][0]) if s.values[-1][0] else 0
    part = Both(f"shown: {rows} by {cols} numbers", f"显示 {rows}×{cols} 个数")
    if s.heads > 1:
        part = Both(f"{part.en} of heads 1 to {min(2, s.heads)} of {s.heads}", f"{part.zh}，共 {s.heads} 个头，取前 {min(2, s.heads)} 个")
    grows = (
        Both(" It grows by a row with every token.", "每读一个 token 就多一行。")
        if s.grows
        else Both(" Its size never changes.", "大小始终不变。")
    )
    how = Both(
        f"The state {s.name}, {shape} after the last token; {part.en}.{grows.en}",
        f"状态 {s.name}，读完最后一个 token 后为 {shape}；{part.zh}。{grows.zh}",
    )
    return _section("state", title, figure("state", "state", caption=how))


def _cost(seen: Inspection) -> str:
    c = cost(seen.info.name, dim=DIM, tokens=TOKENS)
    title = Both("Cost", "开销")
    how = Both(
        f"One layer of width {DIM} with its own defaults, one sequence of {TOKENS:,} tokens, bfloat16; FLOPs count "
        "multiplications and additions.",
        f"一层，宽度 {DIM}，默认选项，一条 {TOKENS:,} 个 token 的序列，bfloat16；FLOPs 计乘法与加法。",
    )
    return _section("cost", title, _listed(cost_facts(c)), spoken(how, "small"))


def cost_facts(c: Cost) -> list[tuple[Both, str]]:
    """Cost sheet: quantities, with their values and units."""
    facts = [
        (Both("parameters", "参数"), f'<span data-value="{c.parameters}">{c.parameters:,}</span>'),
        (Both("prefill", "预填充"), f'<span data-value="{c.flops}">{three(c.flops / 1e9)} GFLOPs</span>'),
    ]
    if c.step_flops is not None:
        facts.append(
            (Both("one more token", "每多一个 token"), f'<span data-value="{c.step_flops}">{three(c.step_flops / 1e6)} MFLOPs</span>')
        )
    if c.state_bytes is not None:
        facts.append((Both("state", "状态"), f'<span data-value="{c.state_bytes}">{memory(c.state_bytes)}</span>'))
        ratio = c.softmax_cache_bytes / c.state_bytes if c.state_bytes else 0.0
        more = Both(f", {times(ratio)} as much", f"，是它的 {ratio:,.0f} 倍") if ratio > 1.05 else Both("", "")
        held = f'<span data-value="{c.softmax_cache_bytes}">{memory(c.softmax_cache_bytes)}</span>{spoken(more) if more.en else ""}'
        facts.append((Both("softmax's cache", "softmax 的缓存"), held))
    return facts


def _checked(seen: Inspection) -> str:
    facts = [(Both("oracle", "对照实现"), spoken(both(seen.info.oracle or "–", seen.info.chinese)))]
    if errors := measured_errors(seen.info.name):
        found = ", ".join(
            f'<span data-value="{error!r}">{f"{error:.1e}" if error else "0"}</span> {dtype}' for dtype, error in errors.largest.items()
        )
        many = Both(f"the largest of {errors.comparisons:,} comparisons", f"{errors.comparisons:,} 次比较中最大")
        number = many if errors.comparisons > 1 else Both("the only comparison", "唯一一次比较")
        count = Both(f" (relative, {number.en}, ", f"（相对误差，{number.zh}，")
        where = f"<code>{escape(errors.test)}</code>{spoken(Both(')', '）'))}"
        facts.append((Both("distance to it", "与它的差距"), f"{found}{spoken(count)}{where}"))
    if seen.stepping is not None:
        told = f'<span data-value="{seen.stepping:.3g}">{seen.stepping:.0e}</span>'
        facts.append(
            (
                Both("one pass against single steps", "整段计算与逐步计算之差"),
                f"{told}{spoken(Both(' (relative, float64, this sentence)', '（相对误差，float64，本句）'))}",
            )
        )
    for check, reason in seen.info.exemptions.items():
        words = spoken(Both(f": {reason}", f"：{both(reason, seen.info.chinese).zh}"))
        facts.append((Both("exempt", "豁免"), f"<code>{escape(check)}</code>{words}"))
    return _section("checked", Both("What it was checked against", "拿什么验证"), _listed(facts))


def _measured(atlas: Atlas, seen: Inspection) -> Iterator[str]:
    tables = list(measured.of(atlas, seen))
    if not tables:
        return
    parts = []
    for t in tables:
        head = "".join(f'<th scope="col">{spoken(h)}</th>' for h in t.heads)
        rows = "".join("<tr>" + "".join(spoken(both(c), "td") for c in row) + "</tr>" for row in t.rows)
        caption = f'<caption>{spoken(t.title)} <span class="small">{spoken(both(t.source))}</span></caption>'
        region = f'<div class="scroll" tabindex="0" role="region" {labelled(t.title)}>'
        parts.append(f"{region}<table>{caption}<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>")
    yield _section("measured", Both("What was measured", "实测"), *parts)


def _code(seen: Inspection) -> str:
    module = seen.info.cls.__module__
    lines = seen.code.count("\n")
    told = Both(f"The whole of {module}, {lines} lines: this is what runs.", f"{module} 的全部 {lines} 行：运行的就是它。")
    source = f'<pre tabindex="0"><code>{escape(seen.code)}</code></pre>'
    return _section("code", Both("Its code", "代码"), f"<details><summary>{spoken(told)}</summary>{source}</details>")


def _around(around: tuple[str | None, str | None]) -> str:
    before, after = (
        f'<a href="{escape(n)}.html">{mark.format(escape(n))}</a>' if n else ""
        for n, mark in zip(around, ("←\u00a0{}", "{}\u00a0→"), strict=True)
    )
    return f'<nav class="around" {labelled(Both("Neighbours", "相邻"))}><span>{before}</span><span>{after}</span></nav>'
