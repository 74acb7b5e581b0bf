"""Story in eight chapters, written by hand in both languages, with figures computed by the ops."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from linattn.atlas.index import gallery
from linattn.atlas.mathml import spread
from linattn.atlas.page import Entry, Page
from linattn.atlas.story.chapters import FIGURES
from linattn.atlas.story.drawings import DRAWINGS, framed
from linattn.atlas.text import Both, fragment, spoken

if TYPE_CHECKING:
    from linattn.atlas.build import Atlas

ENTRY = Entry(
    "story/index.html",
    Both("Story", "故事"),
    Both(
        "From softmax to the delta rule in eight short parts, on one sentence, each with a slider.",
        "从 softmax 到 delta 规则，共八章，只用一句话，每章都有可以拨动的滑块。",
    ),
)
CHAPTERS = (
    Both("Why softmax costs L², and what changes the order", "为什么 softmax 的开销是\u00a0L²，又是什么改变了乘法顺序"),
    Both("Reading a prompt, writing an answer", "读提示，写回答：prefill 与 decode"),
    Both("A sum can neither forget nor emphasise", "求和：既不会遗忘，也分不出轻重"),
    Both("RNN and LSTM: states before attention", "RNN 与 LSTM：注意力之前的状态"),
    Both("Retention and gates", "Retention 与门"),
    Both("From S4 to Mamba", "从 S4 到 Mamba"),
    Both("Mamba-2: recurrence and masked matrix", "Mamba-2：递推与带掩码的矩阵"),
    Both("RWKV and the delta rule", "RWKV 与 delta 规则"),
)
LEADS = (
    Both("Three matrices give the same product in two orders; only one of them builds an L × L matrix.",
         "三个矩阵相乘，两种顺序结果相同，只有一种会产生 L × L 的矩阵。"),
    Both("A cache is a list with a row for every token. A state is one matrix, rewritten at every token.",
         "缓存是一张表，每个 token 占一行；状态是一个矩阵，每来一个 token 就改写一次。"),
    Both("A state that only adds: what it recalls, and what it mixes up.", "只做加法的状态：能读出什么，又会混淆什么。"),
    Both("A state passed from token to token is an old idea, and so is the gate that preserves it.",
         "在 token 之间传递状态并不新，用门来保护它也不新。"),
    Both("A decay between zero and one: fixed in advance, or computed from the token.", "零到一之间的衰减：预先固定，或由 token 算出。"),
    Both("A linear system whose coefficients come to depend on the token.", "一个线性系统，后来系数由 token 决定。"),
    Both("One function computed as a recurrence, as a masked matrix, or chunk by chunk.", "同一个函数的三种算法：递推、带掩码的矩阵、分块。"),
    Both("A separate weight for the current token, and a state that is erased before it is written.",
         "当前 token 另有一个权重；写入之前，先擦除状态。"),
)  # fmt: skip


def pages(atlas: Atlas) -> Iterator[Page]:
    """Make the list of chapters, then the chapters."""
    cards = "".join(
        f'<li><a class="card" href="{n}.html"><b>{n} · {spoken(title)}</b>{spoken(lead, "p")}</a></li>'
        for n, (title, lead) in enumerate(zip(CHAPTERS, LEADS, strict=True), 1)
    )
    body = f'{spoken(OPENING, "p")}<ol class="cards chapters">{cards}</ol>{_line(atlas)}'
    yield Page(ENTRY.path, ENTRY.name, body, lead=ENTRY.summary)
    for n, (title, lead) in enumerate(zip(CHAPTERS, LEADS, strict=True), 1):
        numbers = _numbers(n)
        drawn = {name: framed(draw()) for name, draw in DRAWINGS.get(n, {}).items()}
        drawn["gallery"] = gallery([atlas.inspections[name] for name in MASKS if name in atlas.inspections], "../")
        html = written(Path(__file__).with_name(f"{n}.html"), numbers, drawn)
        shown = {name: value for name, value in numbers.items() if f'data-set="{name}"' in html}
        yield Page(f"story/{n}.html", title, html + _around(n), shown, lead=lead)


@cache
def _numbers(chapter: int) -> dict[str, dict[str, object]]:
    """Data of the figures of ``chapter``, by name, independent of the shown systems."""
    return {name: make() for name, make in FIGURES[chapter].items()}


OPENING = Both(
    "The sentence is “Ann loves tea, Ben loves milk, now Ann loves milk”: a fact, a second one, and then one that replaces the first. "
    "Every picture was computed by the library’s own ops when this page was built; colours mean the same tensor everywhere.",
    "这句话是“小安爱茶，小本爱奶，现在小安爱奶”：一件事，又一件事，然后一件新事取代了第一件。每张图都在生成页面时由库自己的算子算出；同一种颜色，处处是同一个张量。",
)


MASKS = ("softmax", "linear", "retnet", "mamba2", "gla", "gated_deltanet")  # of chapter 7: matrices of the other chapters
LINE = (
    ("softmax", 1, r"o_t = \mathrm{softmax}(q_t K_t^\top)\, V_t", Both("keeps every token", "每个 token 都留着")),
    ("linear", 3, r"S_t = S_{t-1} + k_t^\top v_t", Both("adds", "只做加法")),
    ("retnet", 5, r"S_t = \gamma\, S_{t-1} + k_t^\top v_t", Both("decays at a fixed rate", "按固定速率衰减")),
    ("gla", 5, r"S_t = \mathrm{Diag}(\alpha_t)\, S_{t-1} + k_t^\top v_t", Both("decays at rates that each token sets", "衰减速率由 token 决定")),
    ("mamba", 6, r"h_t = e^{\Delta_t A}\, h_{t-1} + \Delta_t B_t\, x_t", Both("the same recurrence, from control theory", "同样的递推，来自控制理论")),
    ("mamba2", 7, r"S_t = \alpha_t\, S_{t-1} + k_t^\top v_t", Both("one decay per head, and a square", "每个头一个衰减，外加一个方阵")),
    ("rwkv6", 8, r"o_t = q_t\, (S_{t-1} + \mathrm{Diag}(u)\, k_t^\top v_t)", Both("a bonus for the current token", "当前 token 另有 bonus")),
    ("deltanet", 8, r"S_t = S_{t-1} + \beta_t\, k_t^\top (v_t - k_t S_{t-1})", Both("erases before it writes", "先擦除再写入")),
    ("kda", 8, r"D_t = \mathrm{Diag}(\alpha_t) S_{t-1}, \quad S_t = D_t + \beta_t k_t^\top (v_t - k_t D_t)", Both("decays and erases", "既衰减，也擦除")),
)  # fmt: skip
WHOLE = Both("All equations at a glance", "公式一览")


def _line(atlas: Atlas) -> str:
    """List of what each system adds to the previous one, with links to its chapter and its page."""
    rows = []
    for name, chapter, latex, added in LINE:
        page = f' · <a href="../systems/{name}.html"><code>{name}</code></a>' if name in atlas.inspections else ""
        words = f'<a href="{chapter}.html">{spoken(added)}</a>{page}'
        rows.append(f'<dt>{words}</dt><dd tabindex="0">{spread(latex)}</dd>')
    return f'<h2>{spoken(WHOLE)}</h2><dl class="facts equations line-of">{"".join(rows)}</dl>'


RAISED = str.maketrans("0123456789-", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻")


def written(path: Path, numbers: Mapping[str, object], parts: Mapping[str, str] | None = None) -> str:
    """Fill the fragment ``path`` with its numbers, and with HTML of ``parts`` at ``[[name]]``.

    1.9e-16 is set as 1.9 × 10⁻¹⁶, and displayed formulas can be scrolled by keyboard.
    """
    html = fragment(path.read_text(encoding="utf-8"), numbers).replace(
        "<div lang=", '<div class="equation" tabindex="0" role="group" lang='
    )
    return re.sub(r"\[\[(\w+)\]\]", lambda m: (parts or {})[m[1]], raised(html))


def raised(text: str) -> str:
    """Set powers of ten in ``text`` for 1.9e-16, kept on one line."""
    power = r"(?<![\w.])(-?\d(?:\.\d+)?)e([+-]\d+)\b"
    return re.sub(power, lambda m: f"{m[1]}\u00a0×\u00a010{str(int(m[2])).translate(RAISED)}", text)


def _around(n: int) -> str:
    """Links to the chapter before and after."""
    before = (
        f'<a href="{n - 1}.html">←\u00a0{spoken(CHAPTERS[n - 2])}</a>' if n > 1 else f'<a href="index.html">←\u00a0{spoken(ENTRY.name)}</a>'
    )
    after = Both("Now try it: the lab", "动手试试：实验台")
    following = (
        f'<a href="{n + 1}.html">{spoken(CHAPTERS[n])}\u00a0→</a>'
        if n < len(CHAPTERS)
        else f'<a href="../lab.html">{spoken(after)}\u00a0→</a>'
    )
    return f'<div class="around">{before}{following}</div>'
