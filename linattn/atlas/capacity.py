"""Capacity page: the number of key-value pairs that a d × d state can store, by rule and at best.

The script writes and reads live on the pairs of this page; the curves and the table were computed by the library's op.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

import linattn
from linattn.atlas.page import Entry, Page, rounded
from linattn.atlas.story import raised, written
from linattn.atlas.text import Both, spoken

if TYPE_CHECKING:
    from linattn.atlas.build import Atlas

ENTRY = Entry(
    "capacity.html",
    Both("Capacity", "容量"),
    Both(
        "How many pairs a d × d state holds before they blur: write them one by one, and read them all back.",
        "一个 d × d 的状态存多少对键值仍能分辨：逐对写入，再全部读出。",
    ),
)
SIZE = 16  # size of the interactive state
PAIRS = 4 * SIZE
REWRITTEN = SIZE // 2  # keys that are rewritten with new values
KEYS = {
    "random": Both("random", "随机"),
    "orthogonal": Both("each 16 orthogonal", "每 16 个正交"),
    "rewritten": Both(f"{REWRITTEN} keys, rewritten", f"{REWRITTEN} 个键反复改写"),
}
DECAY, BETA = 0.95, 1.0
SIZES = (8, 16, 32)  # of the states of the curves
TIMES = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0, 4.0)  # pairs of the curves, as multiples of d
DRAWS = 8  # sets of random pairs, of which curves show the mean
PASSES = 100  # passes of the delta rule over the same d / 2 pairs
MANY = 20  # multiple of d² numbers stored in d² numbers


def unit(*shape: int, seed: int) -> Tensor:
    """Random vectors of length 1, float64."""
    return torch.nn.functional.normalize(torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64), dim=-1)


def states(keys: Tensor, values: Tensor, *, decay: float = 1.0, beta: float | None = None) -> Tensor:
    """Compute the states [B, d, d] after writing the pairs ``keys``, ``values`` [B, n, d] in this order."""
    log = torch.tensor([decay], dtype=torch.float64).log() if decay < 1 else None
    strength = None if beta is None else torch.full((*keys.shape[:2], 1), beta, dtype=torch.float64)
    k, v = keys[:, :, None], values[:, :, None]
    _, state = linattn.linear_attention(k, k, v, decay=log, beta=strength, scale=1.0, return_state=True)
    return state[:, 0]


RULES = {
    "sum": (Both("sum", "求和"), {}),
    "decayed": (Both("decayed", "衰减"), {"decay": DECAY}),
    "delta": (Both("delta", "delta"), {"beta": BETA}),
}


def error(state: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Relative error ‖K S − V‖ / ‖V‖ of each of B states."""
    return torch.linalg.matrix_norm(keys @ state - values) / torch.linalg.matrix_norm(values)


def recognised(state: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Fraction of pairs whose reading is nearest to their own value, for each of B states."""
    nearest = (keys @ state @ values.mT).argmax(-1)
    return (nearest == torch.arange(keys.shape[1])).double().mean(-1)


@cache
def live() -> dict[str, object]:
    """Data of the figure "capacity": equal values under random keys, keys orthogonal in groups of 16, and a few repeated keys."""
    keys, values = unit(PAIRS, SIZE, seed=1), unit(PAIRS, SIZE, seed=2)
    turns = [
        torch.linalg.qr(torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(3 + i), dtype=torch.float64))[0]
        for i in range(PAIRS // SIZE)
    ]
    sets = {"random": keys, "orthogonal": torch.cat(turns), "rewritten": keys[:REWRITTEN].repeat(PAIRS // REWRITTEN, 1)}
    return {
        "size": SIZE,
        "decay": DECAY,
        "beta": BETA,
        "rules": [{"key": key, "name": name._asdict()} for key, (name, _) in RULES.items()],
        "values": rounded(values.tolist(), 6),
        "keys": [
            {
                "key": name,
                "name": KEYS[name]._asdict(),
                "period": REWRITTEN if name == "rewritten" else PAIRS,
                "keys": rounded(k.tolist(), 6),
            }
            for name, k in sets.items()
        ],
    }


@cache
def curves() -> dict[str, object]:
    """Data of the figure "curves": mean error and mean fraction recognised against pairs per row of the state."""
    sizes = []
    for d in SIZES:
        keys, values = unit(DRAWS, int(TIMES[-1] * d), d, seed=4), unit(DRAWS, int(TIMES[-1] * d), d, seed=5)
        lines: dict[str, list[list[float]]] = {key: [] for key in (*RULES, "best")}
        for times in TIMES:
            k, v = keys[:, : int(times * d)], values[:, : int(times * d)]
            found = {key: states(k, v, **options) for key, (_, options) in RULES.items()}
            found["best"] = torch.linalg.pinv(k) @ v
            for key, state in found.items():
                lines[key].append([times, error(state, k, v).mean().item(), recognised(state, k, v).mean().item()])
        sizes.append({"size": d, "lines": rounded(lines)})
    names = {key: name._asdict() for key, (name, _) in RULES.items()}
    return {"sizes": sizes, "start": 1, "names": {**names, "best": Both("best possible", "理论最优")._asdict()}}


@cache
def exact() -> dict[str, object]:
    """Storage of 20 times the state's size in random and in linear values by the optimal state, and of d pairs by each rule."""
    rows = []
    for d in SIZES:
        n = MANY * d
        k, v = unit(1, n, d, seed=6), unit(1, n, d, seed=7)
        law = unit(1, d, d, seed=8)
        best, easy = torch.linalg.pinv(k) @ v, torch.linalg.pinv(k) @ (k @ law)
        few, half = torch.linalg.qr(unit(1, d, d, seed=9))[0], d // 2
        again = [x[:, :half].repeat(1, PASSES, 1) for x in (k, v)]
        rows.append(
            {
                "d": d,
                "pairs": n,
                "numbers": n * d,
                "state": d * d,
                "lost": (error(best, k, v) ** 2).item(),
                "wanted": 1 - d / n,
                "linear": error(easy, k, k @ law).item(),
                "sum": error(states(few, v[:, :d]), few, v[:, :d]).item(),
                "delta": error(states(*again, beta=BETA), k[:, :half], v[:, :half]).item(),
                "recognised": recognised(best, k, v).item(),
            }
        )
    return {"rows": rows, "times": MANY, "passes": PASSES}


COLUMNS = (
    ("d", Both("d", "d"), "d"),
    ("pairs", Both("pairs", "对数"), ","),
    ("lost", Both("lost at best", "最少损失"), ".4f"),
    ("wanted", Both("1 − d / n", "1 − d / n"), ".4f"),
    ("recognised", Both("still recognised", "仍能认出"), ".1%"),
    ("linear", Both("lost if the values are linear in the keys", "若值是键的线性函数，损失"), ".0e"),
)


def pages(atlas: Atlas) -> Iterator[Page]:  # noqa: ARG001 - as every part's
    """Make the page."""
    found = exact()
    numbers = {"exact": found, "live": live(), "curves": curves()}
    body = written(Path(__file__).with_name("capacity.html"), numbers, {"table": _table(found["rows"])})  # type: ignore[arg-type]
    yield Page(ENTRY.path, ENTRY.name, body, {"capacity": live(), "curves": curves(), "exact": rounded(found)}, lead=ENTRY.summary)


def _table(rows: list[dict[str, float]]) -> str:
    head = "".join(f'<th class="number" scope="col">{spoken(name)}</th>' for _, name, _ in COLUMNS)
    lines = "".join(
        "<tr>"
        + "".join(f'<td class="number" data-value="{row[key]!r}">{escape(raised(format(row[key], form)))}</td>' for key, _, form in COLUMNS)
        + "</tr>"
        for row in rows
    )
    return f'<div class="scroll" tabindex="0"><table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table></div>'
