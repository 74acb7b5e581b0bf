"""Computation of linear attention in five pages: feature maps, the delta rule in parallel, chunks, hybrids, and several cards."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from linattn.atlas.evidence import Evidence, table
from linattn.atlas.methods.figures import CHUNK, CONTEXT, FIGURES, WIDTH
from linattn.atlas.page import Entry, Page
from linattn.atlas.story import written
from linattn.atlas.story.drawings import framed, of
from linattn.atlas.text import Both, spoken
from linattn.report.words import tokens

if TYPE_CHECKING:
    from linattn.atlas.build import Atlas

ENTRY = Entry(
    "methods/index.html",
    Both("Computation", "计算"),
    Both(
        "What replaces exp(q·k), how the delta rule runs in parallel, chunks, hybrid models, and a context over several cards.",
        "用什么替代 exp(q·k)，delta 规则怎样并行，分块计算，混合模型，以及跨多张卡的上下文。",
    ),
)
TITLES = {
    "kernels": Both("Kernels: what replaces exp(q·k)", "核函数：用什么替代 exp(q·k)"),
    "chunks": Both("RetNet and GLA: parallel and in chunks", "RetNet 与 GLA：并行与分块"),
    "delta": Both("The delta rule in parallel", "delta 规则的并行计算"),
    "hybrids": Both("Hybrid models", "混合模型"),
    "cards": Both("One context over several cards", "一段上下文，多张卡"),
}
LEADS = {
    "kernels": Both("Features of queries and keys whose products stand for the exponential.", "用查询与键的特征之积代替指数。"),
    "chunks": Both("The same output as one masked matrix, and as small matrices with a state between them.",
                   "同一个输出，既可用一个带掩码的矩阵，也可用小矩阵加块间状态来算。"),
    "delta": Both("A triangular system per chunk replaces one step after another.", "每块解一个三角方程组，代替逐步计算。"),
    "hybrids": Both("What a few softmax layers add to a linear model, as measured.", "在线性模型里保留少数 softmax 层，实测结果。"),
    "cards": Both("Each card reads its part alone and receives one state.", "每张卡只读自己那段，再接收一个状态。"),
}  # fmt: skip


@cache
def _numbers(page: str) -> dict[str, dict[str, object]]:
    """Data of the figures of ``page``."""
    return {name: make() for name, make in FIGURES[page].items()}


def pages(atlas: Atlas) -> Iterator[Page]:
    """Make the list of pages, then the pages."""
    cards = "".join(f'<li><a class="card" href="{n}.html"><b>{spoken(t)}</b>{spoken(LEADS[n], "p")}</a></li>' for n, t in TITLES.items())
    yield Page(ENTRY.path, ENTRY.name, f'<ol class="cards">{cards}</ol>', lead=ENTRY.summary)
    for name, title in TITLES.items():
        html = written(Path(__file__).with_name(f"{name}.html"), {**_numbers(name), "size": SIZES}, _parts(name, atlas))
        yield Page(f"methods/{name}.html", title, html + _around(name), _numbers(name), lead=LEADS[name])


SIZES = {"chunk": CHUNK, "context": tokens(CONTEXT), "width": WIDTH}


def _parts(name: str, atlas: Atlas) -> dict[str, str]:
    """Drawings and tables of the page ``name``."""
    if name == "chunks":
        return {system: framed(of(system)()) for system in ("retnet", "gla")}
    if name == "hybrids":
        return {"table": table(Evidence(atlas).hybrids())}
    return {}


def _around(name: str) -> str:
    """Links to the page before and after."""
    order = list(TITLES)
    at = order.index(name)
    before = (order[at - 1], TITLES[order[at - 1]]) if at else ("index", ENTRY.name)
    after = (
        (f"{order[at + 1]}.html", TITLES[order[at + 1]]) if at + 1 < len(order) else ("../choose.html", Both("What to choose", "如何选择"))
    )
    return f'<div class="around"><a href="{before[0]}.html">← {spoken(before[1])}</a><a href="{after[0]}">{spoken(after[1])} →</a></div>'
