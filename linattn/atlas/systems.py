"""Pages of all registered systems, made from the registry, the mixer and its measurements."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import escape
from typing import TYPE_CHECKING

from linattn.atlas import measured, sentence
from linattn.atlas.cell import cell, sentences
from linattn.atlas.chinese import both, equation
from linattn.atlas.families import FAMILY, Family
from linattn.atlas.index import index
from linattn.atlas.inspection import Inspection
from linattn.atlas.page import Entry, Page, figure, rounded
from linattn.atlas.text import Both, labelled, spoken, unbroken
from linattn.mixers import Cost, cost
from linattn.mixers.errors import measured_errors
from linattn.mixers.taxonomy import families
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
        "每种方法一页：公式、单元、矩阵、状态、代码、开销，以及验证依据。",
    ),
)
RULE = {
    "none": Both("the state does not decay", "状态不衰减"),
    "constant": Both("the state decays at a fixed rate per head", "状态按每个头的固定速率衰减"),
    "head": Both("the state decays per head, by the token", "状态逐头衰减，由 token 决定"),
    "channel": Both("the state decays per channel of the key, by the token", "状态沿键的通道逐一衰减，由 token 决定"),
    "erase": Both("the state is erased under the key", "擦除状态在该键上的内容"),
    "scores": Both("all tokens are kept and compared", "保留全部 token，逐个比较"),
    "other": Both("its own update rule", "自己的更新规则"),
}
DIM, TOKENS = 512, 4096  # width and tokens of the cost sheet


def pages(atlas: Atlas) -> Iterator[Page]:
    """Make a list of all systems, and one page for each."""
    yield index(ENTRY, atlas.inspections.values())
    order = list(atlas.names)
    for i, name in enumerate(atlas.each("a page for", order)):
        around = (order[i - 1] if i else None, order[i + 1] if i + 1 < len(order) else None)
        yield _page(atlas, atlas.inspections[name], around)


def _page(atlas: Atlas, seen: Inspection, around: tuple[str | None, str | None]) -> Page:
    i = seen.info
    data: dict[str, object] = {}
    if seen.matrix is not None:
        data["mask"] = mask_data(seen)
    if seen.states is not None:
        data["state"] = state_data(seen)
    parts = [_pair(_facts(seen), _equation(i)), _cell(seen), _pair(_mask(seen), _state(seen)), _pair(_cost(seen), _checked(seen))]
    parts += [*_measured(atlas, seen), _code(seen), _around(around)]
    return Page(f"systems/{i.name}.html", seen.title, "\n".join(parts), data, lead=FAMILY[seen.family].about)


def mask_data(seen: Inspection) -> dict[str, object]:
    """Data of the figure "mask", with a name for each matrix where a token writes several values."""
    made: dict[str, object] = {"tokens": sentence.tokens(), "causal": seen.info.causal, "matrix": rounded(seen.matrix)}
    if seen.values > 1:
        made["names"] = [f"{i // seen.values + 1}.{i % seen.values + 1}" for i in range(len(seen.matrix or ()))]
    return made


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
        (Both("family", "类别"), spoken(Both(", ", "、")).join(_linked(FAMILY[family]) for family in families(i))),
        (Both("before a write", "写入之前"), spoken(_rule(seen))),
        (Both("in Python", "在 Python 中"), f'<code>linattn.mixers.create("{escape(i.name)}", dim=512)</code>'),
    ]
    return _listed(facts)


def _linked(family: Family) -> str:
    return f'<a href="index.html#{family.key}">{spoken(family.name)}</a>'


def _rule(seen: Inspection) -> Both:
    """Operation before a write; systems without a state have none."""
    at_once = Both("nothing: all tokens are there at once", "无：全部 token 同时在场")
    return RULE[seen.rule] if seen.info.resumable or seen.spec else at_once


def _listed(facts: list[tuple[Both, str]]) -> str:
    return '<dl class="facts">' + "".join(f"<dt>{spoken(k)}</dt><dd>{v}</dd>" for k, v in facts) + "</dl>"


def _equation(info: Info) -> str:
    """MathML of the equation; the source for a plugin's equation outside the subset."""
    try:
        shown = spoken(Both(*(rf"\[{words}\]" for words in equation(info.equation, info.chinese))), "div") if info.equation else ""
    except ValueError:
        shown = f"<code>{escape(info.equation)}</code>"
    return f'<div class="equation" tabindex="0" role="group" {labelled(Both("Equation", "公式"))}>{shown}</div>' if shown else ""


def _pair(*parts: str) -> str:
    """Lay ``parts`` out side by side in a wide window, else one below the other."""
    return f'<div class="pair">{"".join(parts)}</div>'


def _section(key: str, title: Both, *parts: str) -> str:
    return f'<section id="{key}"><h2>{spoken(title)}</h2>{"".join(parts)}</section>'


def _note(words: Both) -> str:
    return f'<div class="note">{spoken(words, "p")}</div>'


def _cell(seen: Inspection) -> str:
    if seen.spec is None:
        told = _note(_claimed(seen))
    else:
        told = '<ul class="said">' + "".join(f"<li>{spoken(s)}</li>" for s in sentences(seen.spec)) + "</ul>"
    title = Both("The cell", "单元")
    drawing = f'<figure class="drawn"><div class="wide" tabindex="0" role="group" {labelled(title)}>{cell(seen)}</div></figure>'
    return _section("cell", title, f'<div data-claim="{seen.claim}">{drawing}{told}</div>')


def _claimed(seen: Inspection) -> Both:
    """Relation of the system to the recurrence and to its values, as measured on its code."""
    why = seen.missing["spec"]
    if seen.claim == "own":
        return Both(f"This is not a case of the library's recurrence: {why.en}.", f"它不是本库统一递推式的特例：{why.zh}。")
    distance = f"{seen.nonlinearity or 0:.0e}"
    return Both(
        f"This is not one run of the recurrence: {why.en}. Its output is linear in the values all the same "
        f"(relative distance {distance}, float64).",
        f"它不是该递推的一次运行：{why.zh}。不过输出对值仍是线性的（相对偏差 {distance}，float64）。",
    )


def _mask(seen: Inspection) -> str:
    title = Both("Which token reads which", "哪个 token 读哪个")
    if seen.matrix is None:
        why = seen.missing["matrix"]
        return _section("mask", title, _note(Both(f"There is no such matrix: {why.en}.", f"没有这样的矩阵：{why.zh}。")))
    heads = _heads(seen.heads, -(-len(seen.matrix) // seen.values), seen.values)
    grid = seen.info.kind == "grid"
    cross = seen.info.kind == "cross"
    how = Both(
        "A row is an output, a column the token whose value it reads. "
        + ("The twelve tokens lie on a grid of 3 by 4. " if grid else "The sentence looks at itself as its context. " if cross else "")
        + f"The mixer is as it was created, before any training. {heads.en}",
        "一行是一个输出，一列是被读出其值的 token。"
        + ("十二个 token 排成 3 行 4 列。" if grid else "句子以自身为上下文。" if cross else "")
        + f"权重是刚创建时的样子，未经训练。{heads.zh}",
    )
    return _section("mask", title, figure("mask", "mask", caption=how))


def _heads(heads: int, shown: int, values: int) -> Both:
    """Number of heads, of those shown, and of matrices per head where there are several."""
    en = f"Heads 1 to {shown} of {heads}." if heads > shown else f"All heads: {heads}."
    zh = f"共 {heads} 个头，显示前 {shown} 个。" if heads > shown else f"共 {heads} 个头。"
    if values == 1:
        return Both(en, zh)
    return Both(
        f"{en} A token writes {values} values per head, each with a matrix of its own: 2.1 is head 2, value 1.",
        f"{zh}每个 token 在每个头写入 {values} 个值，各有一个矩阵：2.1 即第 2 个头的第 1 个值。",
    )


def _state(seen: Inspection) -> str:
    title = Both("What it remembers", "它记住了什么")
    s = seen.states
    if s is None:
        why = seen.missing.get("states", Both("it has no state", "它不保存数值"))
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
        f"One layer of width {DIM} with default options, one sequence of {TOKENS:,} tokens, bfloat16; FLOPs count "
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
        more = Both(f", {times(ratio)} as much", f"，是状态的 {times(ratio).removesuffix(' times')} 倍") if ratio > 1.05 else Both("", "")
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
        number = many if errors.comparisons > 1 else Both("the only comparison", "仅一次比较")
        count = Both(f" (relative, {number.en}, ", f"（相对误差，{number.zh}，")
        test = re.sub("[/_]", r"\g<0><wbr>", escape(errors.test))  # allowed line breaks
        where = f'<span class="whole"><code>{test}</code>{spoken(Both(")", "）"))}</span>'
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
    return _section("checked", Both("What it was checked against", "验证依据"), _listed(facts))


def _entry(text: str) -> str:
    """An entry of a table; sentences and phrases get more width on a phone."""
    cell = unbroken(spoken(both(text), "td"))
    kind = "words" if len(text) > 32 else "phrase" if len(text) > 20 else ""
    return cell.replace("<td", f'<td class="{kind}"') if kind else cell


def _measured(atlas: Atlas, seen: Inspection) -> Iterator[str]:
    tables = list(measured.of(atlas, seen))
    if not tables:
        return
    shown = "".join(map(_table, tables))
    yield _section("measured", Both("What was measured", "实测"), f'<div class="tables">{shown}</div>')


def _table(t: measured.Measured) -> str:
    """Set ``t`` under its title, by which a script closes long tables on a phone."""
    shared, kept = _constant(t)
    head = "".join(f'<th scope="col">{spoken(t.heads[i])}</th>' for i in kept)
    rows = "".join("<tr>" + "".join(_entry(row[i]) for i in kept) + "</tr>" for row in t.rows)
    source = both(t.source)
    of_all = Both(
        "".join(f"; {name.en}: {value.en}" for name, value in shared), "".join(f"；{name.zh}：{value.zh}" for name, value in shared)
    )
    caption = f"<caption>{unbroken(spoken(Both(source.en + of_all.en, source.zh + of_all.zh)))}</caption>"
    where = labelled(Both(f"{t.title.en}: {source.en}", f"{t.title.zh}：{source.zh}"))  # two tables may share a title
    region = f'<div class="scroll" tabindex="0" role="region" {where}>'
    table = f"{region}<table>{caption}<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
    return f'<details class="measured" open><summary>{spoken(t.title)}</summary>{table}</details>'


def _constant(t: measured.Measured) -> tuple[list[tuple[Both, Both]], list[int]]:
    """Names and values of the columns with equal values in all of several rows, and the indices of the others."""
    same = [i for i in range(len(t.heads)) if len(t.rows) > 1 and len({row[i] for row in t.rows}) == 1]
    kept = [i for i in range(len(t.heads)) if i not in same]
    return [(t.heads[i], both(t.rows[0][i])) for i in same if t.rows[0][i] != "–"], kept


def _code(seen: Inspection) -> str:
    module, lines = seen.info.cls.__module__, seen.code.count("\n")
    told = Both(f"The code of {module}, {lines}\u00a0lines", f"{module} 的代码，{lines}\u00a0行")
    source = f'<pre tabindex="0"><code>{escape(seen.code)}</code></pre>'
    summary = spoken(told).replace(module, module.replace(".", ".<wbr>"))
    return _section("code", Both("Its code", "代码"), f"<details><summary>{summary}</summary>{source}</details>")


def _around(around: tuple[str | None, str | None]) -> str:
    before, after = (
        f'<a href="{escape(n)}.html">{mark.format(escape(n))}</a>' if n else ""
        for n, mark in zip(around, ("←\u00a0{}", "{}\u00a0→"), strict=True)
    )
    return f'<nav class="around" {labelled(Both("Neighbours", "相邻"))}><span>{before}</span><span>{after}</span></nav>'
