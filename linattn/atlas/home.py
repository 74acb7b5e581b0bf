"""First page: an introduction to the atlas, the one recurrence, and links."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import TYPE_CHECKING

from linattn.atlas.index import gallery
from linattn.atlas.mathml import mathml
from linattn.atlas.page import Page
from linattn.atlas.text import Both, spoken

if TYPE_CHECKING:
    from linattn.atlas.build import Atlas

TITLE = Both("Linear attention, drawn by the code that computes it", "线性注意力图解：每张图都由库的代码算出")
LEAD = Both(
    "Softmax attention looks back at every token and pays for it with a cache that grows. Replace the similarity by one that "
    "factors, and the whole past fits into one matrix. Linear attentions differ in what they write into it, how it decays and what "
    "they erase.",
    "softmax 注意力回看每一个 token，缓存随之不断增长。把相似度换成可以分解的形式，全部历史就能装进一个矩阵。各种线性注意力的区别在于：往里写入什么，"
    "怎样衰减，又擦除什么。",
)
RECURRENCE = (
    (r"S_t = \mathrm{Diag}(\alpha_t)\, S_{t-1}", Both("decay", "衰减"), "decay"),
    (r"+\; w_t\, (r_t^\top S_{t-1})", Both("erase", "擦除"), "decay"),
    (r"+\; k_t^\top v_t", Both("write", "写入"), "k"),
    (r"o_t = q_t\, S_t", Both("read", "读出"), "output"),
)


GALLERY = ("softmax", "linear_transformer", "retnet", "gla", "gated_deltanet", "rwkv7")  # one of each step, if present
SHOWN = Both("One sentence, several systems", "同一句话，不同方法")
HOW = Both(
    "Rows are outputs, columns the tokens that they read: the library computed every cell from the same twelve words.",
    "行是输出，列是被读的 token；每一格都由本库从同样的十二个词算出。",
)


def pages(atlas: Atlas) -> Iterator[Page]:
    """Make the first page."""
    from linattn.atlas.build import sections

    terms = "".join(f'<div class="term t{tensor}">{mathml(latex)}<span>{spoken(words)}</span></div>' for latex, words, tensor in RECURRENCE)
    cards = "".join(
        f'<li><a class="card" href="{escape(part.ENTRY.path)}"><b>{spoken(part.ENTRY.name)}</b>{spoken(part.ENTRY.summary, "p")}</a></li>'
        for part in sections()
    )
    body = f'<div class="recurrence">{terms}</div>\n<ul class="cards">{cards}</ul>{_gallery(atlas)}'
    yield Page("index.html", TITLE, body, lead=LEAD)


def _gallery(atlas: Atlas) -> str:
    """Show some matrices, each with its family's name and a link to its page."""
    shown = gallery([seen for name in GALLERY if (seen := atlas.inspections.get(name))])
    return f"<h2>{spoken(SHOWN)}</h2>{spoken(HOW, 'p')}{shown}" if shown else ""
