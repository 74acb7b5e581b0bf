"""Cost page: operations, bytes and time against length, as formulas in width, heads and length fitted to ``linattn.cost``.

A mixer's cost is a polynomial in width and heads, fitted to a few calls of :func:`linattn.cost` and checked on further
calls. If it is not a polynomial (ranks that a paper rounds), the page states the error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from linattn.atlas.inspection import Inspection
from linattn.atlas.measured import recurrence
from linattn.atlas.page import Entry, Page, figure
from linattn.atlas.text import Both, spoken
from linattn.bench.gpu.cases import usual
from linattn.mixers import Cost, cost
from linattn.state import content_of

if TYPE_CHECKING:
    from linattn.atlas.build import Atlas

ENTRY = Entry(
    "cost.html",
    Both("Cost", "开销"),
    Both(
        "Time, operations and memory against length, for your own width, heads, layers and batch: what grows, what does not, "
        "where they cross.",
        "用你自己的宽度、头数、层数与批大小，看时间、运算量与内存随长度怎样变化：什么在涨，什么不涨，在哪里交叉。",
    ),
)
# Terms of width D and heads H, as script/cost.js evaluates them.
WITH_HEADS: tuple[Callable[[Fraction, Fraction], Fraction], ...] = (
    lambda d, h: Fraction(1), lambda d, h: d, lambda d, h: d * d, lambda d, h: h, lambda d, h: d * h,
    lambda d, h: d / h, lambda d, h: d * d / h,
)  # fmt: skip
WITHOUT = WITH_HEADS[:3]
NODES = ((512, 4), (512, 8), (1024, 4), (1024, 16), (2048, 8), (2048, 32), (4096, 16))
OTHER = (3072, 16)  # width and heads at which a formula is checked
LENGTHS = ((64, 128), (512, 1024))  # tokens; longer ones if short ones do not fit, since some mixers loop over pieces
TRIED = 2048  # tokens at which a formula is checked
FIRST = ("softmax", "gla", "mamba2", "gated_deltanet")  # initial selection


@dataclass(frozen=True)
class CostFormula:
    """Formulas of a system: coefficients of the terms above, one list for each power of the number of tokens T.

    ``parameters`` [1]; ``prefill`` (FLOPs of T tokens, for each of them), ``step`` (FLOPs of one token after T) and ``state`` (bytes
    after T, bfloat16): [1, T], or [1] if constant. ``error`` is the largest relative one at :data:`OTHER`, :data:`TRIED`.
    """

    name: str
    heads: bool
    parameters: list[list[float]]
    prefill: list[list[float]]
    step: list[list[float]]
    state: list[list[float]]
    error: float


def cost_formula(seen: Inspection) -> CostFormula:
    """Fit the formulas of one system to :func:`linattn.cost`: on short sequences, or on longer ones if these do not fit (windows)."""
    known = _cost(seen, *OTHER, TRIED)
    found = _fitted(seen, *LENGTHS[0], known)
    return found if found.error < 1e-9 else min(found, _fitted(seen, *LENGTHS[1], known), key=lambda p: p.error)


def _cost(seen: Inspection, dim: int, heads: int, tokens: int) -> Cost:
    options: dict[str, Any] = {"heads": heads} if "heads" in seen.info.options else {}
    return cost(seen.info.name, dim=dim, tokens=tokens, **options)


def _fitted(seen: Inspection, few: int, many: int, known: Cost) -> CostFormula:
    """Fit formulas to sequences of ``few`` and, if the state grows, ``many`` tokens, with their error against ``known``."""
    grows, heads = not seen.info.recurrent, "heads" in seen.info.options
    terms, nodes = (WITH_HEADS, NODES) if heads else (WITHOUT, NODES[0::2][:3])
    short = [_cost(seen, d, h, few) for d, h in nodes]
    long = [_cost(seen, d, h, many) for d, h in nodes] if grows else short

    def formula(key: Callable[[Cost], Fraction]) -> list[list[float]]:
        """Coefficients of a quantity a + b T from its values at two lengths; only a if constant."""
        slopes = [(key(b) - key(a)) / (many - few) for a, b in zip(short, long, strict=True)]
        ground = [key(a) - few * slope for a, slope in zip(short, slopes, strict=True)]
        return [_solved(terms, nodes, values) for values in ((ground, slopes) if grows else (ground,))]

    made = CostFormula(
        name=seen.info.name,
        heads=heads,
        parameters=formula(lambda c: Fraction(c.parameters))[:1],
        prefill=formula(lambda c: Fraction(c.flops, c.tokens)),
        step=formula(lambda c: Fraction(c.step_flops or 0)),
        state=formula(lambda c: Fraction(c.state_bytes or 0)),
        error=0.0,
    )
    return replace(made, error=_error(made, known))


def evaluate(formula: Sequence[Sequence[float]], dim: int, heads: int, tokens: int) -> float:
    """Evaluate a formula, as script/cost.js does."""
    total = 0.0
    for power, coefficients in enumerate(formula):
        terms = (float(term(Fraction(dim), Fraction(heads))) for term in WITH_HEADS)
        total += tokens**power * sum(c * t for c, t in zip(coefficients, terms, strict=False))
    return total


def _solved(terms: Sequence[Callable], nodes: Sequence[tuple[int, int]], values: Sequence[Fraction]) -> list[float]:
    """Coefficients for which the terms have the ``values`` at the ``nodes``, by elimination in fractions."""
    rows = [[term(Fraction(d), Fraction(h)) for term in terms] + [Fraction(v)] for (d, h), v in zip(nodes, values, strict=True)]
    n = len(terms)
    for i in range(n):
        pivot = next(r for r in range(i, n) if rows[r][i])
        rows[i], rows[pivot] = rows[pivot], rows[i]
        rows[i] = [x / rows[i][i] for x in rows[i]]
        for r in range(n):
            if r != i and rows[r][i]:
                rows[r] = [x - rows[r][i] * y for x, y in zip(rows[r], rows[i], strict=True)]
    return [int(v) if v.denominator == 1 else float(v) for v in (row[n] for row in rows)]


def _error(p: CostFormula, known: Cost) -> float:
    dim, heads = OTHER
    told = {
        "parameters": evaluate(p.parameters, dim, heads, known.tokens),
        "flops": known.tokens * evaluate(p.prefill, dim, heads, known.tokens),
        "step_flops": evaluate(p.step, dim, heads, known.tokens),
        "state_bytes": evaluate(p.state, dim, heads, known.tokens),
    }
    errors = (abs(value - getattr(known, key)) / getattr(known, key) for key, value in told.items() if getattr(known, key))
    return max(errors, default=0.0)


def pages(atlas: Atlas) -> Iterator[Page]:
    """Make the page."""
    body = spoken(TEXT, "p") + figure("cost", "cost", caption=HOW) + f"<h2>{spoken(WHERE)}</h2>" + spoken(TIERS, "p")
    yield Page(ENTRY.path, ENTRY.name, body, {"cost": data(atlas)}, lead=ENTRY.summary)


TEXT = Both(
    "Softmax compares every token with every earlier one: the work of reading a prompt of length L grows as L², and every new "
    "token has to look at a "
    "cache that grew by one row. A state of fixed size makes the first a straight line and the second a constant. What is "
    "cheap for a short text may not be for a long one: look where the lines cross.",
    "softmax 让每个 token 与此前每个 token 比较：读入长度为 L 的提示，运算量按 L² 增长，而每个新 token 都得翻看一个又长了一行的缓存。"
    "固定大小的状态把前者变成直线，把后者变成常数。短文本上开销小的，长文本上未必：看看两条线在哪里相交。",
)
HOW = Both(
    "Counted by linattn.cost: multiplications and additions of the mixers alone, without the feed-forward, which is the same "
    "for all. Times are lower "
    "bounds, operations over the peak rate or bytes over the bandwidth, whichever is more; points are measured, on the recurrence alone.",
    "由 linattn.cost 计数：只含混合层的乘法与加法，不含对所有方法都相同的前馈层。时间是下限：运算量除以峰值算力，"
    "或字节数除以带宽，取较大者；"
    "圆点为实测值，只测递推本身。",
)
WHERE = Both("Where a cache goes when it no longer fits", "缓存放不下时去哪里")
TIERS = Both(
    "A key-value cache trades memory for time, and memory on the card is scarce: when it is full, caches move to the host's "
    "memory, then to disk, each "
    "step slower by an order of magnitude. The horizontal lines in the view “memory kept” are those three sizes; a state of "
    "fixed size stays below "
    "the first one however long the text.",
    "KV 缓存以空间换时间，而显存有限：放满之后，缓存先搬到内存，再搬到固态硬盘，每一级都慢一个数量级。"
    "“保留的内存”视图中的横线就是这三种容量；固定大小的状态无论文本多长，都留在第一条线以下。",
)


def data(atlas: Atlas) -> dict[str, object]:
    """Data of the figure "cost"."""
    names = shown_systems(atlas)
    systems = [_system(atlas.inspections[name]) for name in atlas.each("the cost of", names)]
    first = [name for name in FIRST if name in names] or names[:4]
    return {"systems": systems, "first": first, "measured": list(points(atlas))}


def shown_systems(atlas: Atlas) -> list[str]:
    """Systems with formulas in the figure."""
    return [name for name, seen in atlas.inspections.items() if seen.info.resumable]


def _system(seen: Inspection) -> dict[str, object]:
    return {**vars(cost_formula(seen)), "title": seen.title._asdict(), "kind": recurrence(seen)}


def points(atlas: Atlas) -> Iterator[dict[str, object]]:
    """Measured milliseconds of one pass of a recurrence on a GPU, bfloat16, usual decays."""
    for path, body in atlas.measured("ops-*.json"):
        if body.get("schema") == "linattn.bench.gpu":
            with content_of(path):
                yield from _points(body)


def _points(body: dict) -> Iterator[dict[str, object]]:
    for row in body["rows"]:
        if row["mode"] != "forward" or not row["ms"] or row["library"] == "fla":
            continue
        if (row["decay"], row["decay_dtype"]) != usual(row["family"]):
            continue
        shape = {part[0]: int(part[1:]) for part in row["shape"].split()}
        yield {"kind": row["family"], "card": body["card"], "ms": row["ms"], **shape}
