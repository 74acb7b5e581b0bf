"""Pitfalls: common wrong formulas and sentences on linear attention, each shown failing beside the right form."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

import linattn
from linattn.atlas import lab, sentence
from linattn.atlas.page import Entry, Page
from linattn.atlas.story import written
from linattn.atlas.story.sheets import WORDS, causal, control, distance, matrix, number, sheet, sheets
from linattn.atlas.text import Both

if TYPE_CHECKING:
    from linattn.atlas.build import Atlas

ENTRY = Entry(
    "pitfalls.html",
    Both("Pitfalls", "常见错误"),
    Both(
        "Formulas that look right and are not: a mask in the wrong place, an index, a missing letter, a quotient that overflows. See each of them fail.",
        "看着对、其实不对的公式：放错位置的掩码，一个下标，少了一个字母，一个会溢出的商。亲眼看它们出错。",
    ),
)
LOUD = (0, 1, 2, 4, 8)  # factors of the last word's key
EARLY = 7  # token whose output is shown, long before the last one
LENGTHS = (16, 64, 256, 1024, 1536, 2048)
STOPS = (4, 8, 12)


def _sentence() -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values [12, 8] of the running sentence, all equal to the word."""
    x = torch.tensor([lab.vector(word) for word in WORDS], dtype=torch.float64)
    return 4 * x, x, x


def _after(scores: Tensor) -> Tensor:
    return scores.softmax(-1).tril()


def _before(scores: Tensor) -> Tensor:
    return scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf).softmax(-1)


def masks() -> dict[str, object]:
    """Pitfall of the mask after the softmax: a later word changes an earlier output."""
    q, k, v = _sentence()
    found = []
    for loud in LOUD:
        scores = q @ torch.cat([k[:-1], loud * k[-1:]]).T
        found.append((_after(scores), _before(scores)))
    (first_after, first_before), row = found[1], EARLY - 1
    names = (sentence.SENTENCE, sentence.SENTENCE, 18)
    return sheets(
        control("future", Both("key of the last word", "末词的键"), [f"× {c}" for c in LOUD], 1),
        [
            sheet("wrong", Both("softmax, then mask", "先 softmax，后掩码"), [causal(a) for a, _ in found], *names),
            sheet("right", Both("mask, then softmax", "先掩码，后 softmax"), [causal(b) for _, b in found], *names),
        ],
        [
            number("sum", Both(f"row {EARLY} adds up to, in the wrong form", f"错误写法：第 {EARLY} 行之和"), [a[row].sum().item() for a, _ in found]),
            number("proper", Both("and as it should be", "应当是"), [b[row].sum().item() for _, b in found]),
            number("leak", Both(f"change of output {EARLY}, in the wrong form", f"错误写法：第 {EARLY} 个输出的变化"), [distance(a[row] @ v, first_after[row] @ v) for a, _ in found]),
            number("none", Both("and as it should be", "应当是"), [distance(b[row] @ v, first_before[row] @ v) for _, b in found]),
        ],
    )  # fmt: skip


def index() -> dict[str, object]:
    """Pitfall of q_i for q_t in the denominator: weights do not add up to one."""
    q, k, _ = _sentence()
    stops = (0.25, 0.5, 1.0, 1.5, 2.0)
    found = []
    for c in stops:
        scores = (c * q @ k.T).exp().tril()
        own = (c * q * k).sum(-1).exp().cumsum(0)
        found.append((scores / own[:, None], scores / scores.sum(-1, keepdim=True)))
    names = (sentence.SENTENCE, sentence.SENTENCE, 18)
    last = -1
    return sheets(
        control("scale", Both("queries scaled by", "查询放大"), [f"× {c:g}" for c in stops], 2),
        [
            sheet("wrong", Both("divided by Σ exp(qᵢ kᵢ)", "除以 Σ exp(qᵢ kᵢ)"), [causal(a) for a, _ in found], *names),
            sheet("right", Both("divided by Σ exp(qₜ kᵢ)", "除以 Σ exp(qₜ kᵢ)"), [causal(b) for _, b in found], *names),
        ],
        [
            number("sum", Both("last row adds up to, in the wrong form", "错误写法：末行之和"), [a[last].sum().item() for a, _ in found]),
            number("proper", Both("and as it should be", "应当是"), [b[last].sum().item() for _, b in found]),
        ],
    )


def missing() -> dict[str, object]:
    """Pitfall of a missing Q in the parallel form: shapes fit only for one length, and the result is wrong."""
    made = lab.inputs(WORDS, lab.RULES[0])
    results: list[Both] = []
    for length in STOPS:
        q, k, v = (made[name][0, :length, 0] for name in ("q", "k", "v"))
        whole = linattn.linear_attention(**{**made, **{n: x[None, :, None] for n, x in (("q", q), ("k", k), ("v", v))}})[0, :, 0]
        try:
            apart = distance((k.T * torch.ones(length, length).tril()) @ v, whole)
            results.append(Both(f"runs, but is off by {apart:.0%}", f"能跑，但差了 {apart:.0%}"))
        except RuntimeError:
            shape = f"[{lab.SIZE}, {length}] ⊙ [{length}, {length}]"
            results.append(Both(f"{shape}: the shapes do not fit", f"{shape}：形状对不上"))
    return sheets(
        control("length", Both("tokens", "token 数"), [str(n) for n in STOPS], 2),
        [],
        [number("result", Both("(Kᵀ ⊙ M) V", "(Kᵀ ⊙ M) V"), results)],
    )


@cache
def quotient() -> dict[str, object]:
    """Pitfall of K divided by the cumulative decay: its float32 error and the library's, both against float64."""
    draw = torch.Generator().manual_seed(0)
    longest = LENGTHS[-1]
    q, k, v, gate = (torch.randn(1, longest, 1, 8, generator=draw, dtype=torch.float64) for _ in range(4))
    decay = torch.nn.functional.logsigmoid(gate) / 16
    rows: dict[str, list[float | Both]] = {"largest": [], "wrong": [], "library": []}
    overflow = Both("overflow: not a number", "溢出：不是数")
    for length in LENGTHS:
        parts = [x[:, :length] for x in (q, k, v, decay)]
        wanted = linattn.linear_attention(*parts[:3], decay=parts[3], scale=1.0)
        short = [x.float() for x in parts]
        b = short[3].cumsum(1).exp()
        wrong = (((short[0] * b)[0, :, 0] @ (short[1] / b)[0, :, 0].T).tril() @ short[2][0, :, 0])[None, :, None]
        own = linattn.linear_attention(*short[:3], decay=short[3], scale=1.0)
        largest = (1 / b).max().item()
        rows["largest"].append(largest if largest < float("inf") else overflow)
        rows["wrong"].append(distance(wrong.double(), wanted) if wrong.isfinite().all() else overflow)
        rows["library"].append(distance(own.double(), wanted))
    return sheets(
        control("tokens", Both("tokens", "token 数"), [f"{n:,}" for n in LENGTHS], 2),
        [],
        [
            number("largest", Both("largest 1 / B", "最大的 1 / B"), rows["largest"]),
            number("wrong", Both("error of ((Q ⊙ B)(K / B)ᵀ ⊙ M) V", "((Q ⊙ B)(K / B)ᵀ ⊙ M) V 的误差"), rows["wrong"]),
            number("library", Both("error of the library, float32 too", "本库的误差，同为 float32"), rows["library"]),
        ],
    )


def blocked() -> dict[str, object]:
    """Pitfall of "the mask prevents linear cost": memory of the quadratic form and of chunks, and their distance."""
    stops, d, chunk = (64, 256, 1024), 8, 16
    draw = torch.Generator().manual_seed(1)
    apart = []
    for length in stops:
        q, k, v = (torch.randn(1, length, 1, d, generator=draw, dtype=torch.float64) for _ in range(3))
        apart.append(distance(linattn.linear_attention(q, k, v, form="chunk"), linattn.linear_attention(q, k, v, form="parallel")))
    return sheets(
        control("tokens", Both("tokens L", "token 数 L"), [f"{n:,}" for n in stops], 2),
        [],
        [
            number("square", Both("cells of the square, L²", "方阵的格数 L²"), [n * n for n in stops]),
            number("chunks", Both(f"cells of its chunks of {chunk}, and the states between them", f"切成 {chunk} 一块的格数，加块间状态"), [n * chunk + n // chunk * d * d for n in stops]),
            number("apart", Both("distance of the two results", "两种结果之差"), apart),
        ],
    )  # fmt: skip


def clock() -> dict[str, object]:
    """Pitfall of a constant decay as memory: its decay matrix does not depend on the words, unlike a gate's."""
    one = torch.ones(1, 12, 1, 1, dtype=torch.float64)
    told = {"as told": WORDS, "the facts swapped": WORDS[4:7] + WORDS[3:4] + WORDS[:3] + WORDS[7:], "backwards": WORDS[::-1]}
    rules = {rule.key: rule for rule in lab.RULES}
    found = {
        key: [matrix({"q": one, "k": one, "decay": lab.inputs(words, rules[key])["decay"], "scale": 1.0}) for words in told.values()]
        for key in ("constant", "head")
    }
    shows = [Both("as told", "原句"), Both("the facts swapped", "两件事对调"), Both("backwards", "倒着读")]
    places = [str(t) for t in range(1, 13)]
    return sheets(
        control("words", Both("the words", "词序"), shows),
        [
            sheet("constant", Both("constant γ", "固定的 γ"), [causal(m) for m in found["constant"]], places, places, 18),
            sheet("head", Both("a gate", "门"), [causal(m) for m in found["head"]], places, places, 18),
        ],
        [
            number(
                "constant", Both("change with constant γ", "固定的 γ：变化"), [distance(m, found["constant"][0]) for m in found["constant"]]
            ),
            number("head", Both("change with a gate", "门：变化"), [distance(m, found["head"][0]) for m in found["head"]]),
        ],
    )


FIGURES: dict[str, Callable[[], dict[str, object]]] = {
    "masks": masks,
    "index": index,
    "missing": missing,
    "quotient": quotient,
    "blocked": blocked,
    "clock": clock,
}


@cache
def _numbers() -> dict[str, dict[str, object]]:
    """Data of the figures, by name."""
    return {name: make() for name, make in FIGURES.items()}


def pages(atlas: Atlas) -> Iterator[Page]:  # noqa: ARG001 - as every part's
    """Make the page."""
    numbers = _numbers()
    html = written(Path(__file__).with_name("pitfalls.html"), numbers)
    yield Page(ENTRY.path, ENTRY.name, html, numbers, lead=ENTRY.summary)
