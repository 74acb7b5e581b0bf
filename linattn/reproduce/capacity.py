"""Number of pairs that an untrained K x V state can return: written by the recurrence, then read with the same keys.

Of random values a state S [K, V] can return at most K exactly: o = k S is linear, so the values of n > K keys would obey the
n - K linear relations of their keys, and random ones do not. Any K pairs with independent keys have a state that returns them all
(S = K⁺ V); whether a rule reaches it depends on the rule:

* additive: S = Σ kᵀ v returns v_i + Σ_j (k_i · k_j) v_j: exact only for orthonormal keys, for random ones with an error of √((n-1)/K).
* decayed: the same with a factor α per step on older pairs: exact only for the last.
* delta with β = 1: each step makes the last pair exact. One pass over orthonormal keys returns all K; over random ones it is Kaczmarz's
  iteration, which converges over passes to the state that returns all K.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from linattn import linear_attention, mixers
from linattn.experiment.study import Column, Done, LeftOut, Result, Row, Run, Study, grouped, mean_and_spread, number
from linattn.mixers import CallContext, Recurrence
from linattn.report.charts import Chart
from linattn.report.plot import Heading
from linattn.reproduce import variants
from linattn.reproduce.charts import curves, in_tokens, share_of

EXACT = 1e-3  # largest ‖k S - v‖ / ‖v‖ of a pair that counts as returned exactly
KNOWN = 0.99  # minimum share of pairs whose own value is the nearest, for "returned"
_REBASED = ("efficient_attention", "gaussian", "performer")  # their decays only rescale the sum


@dataclass(frozen=True)
class Settings:
    """K = V = ``size``; pairs in ``fractions`` of it; ``passes`` over them."""

    mixers: tuple[str, ...] = ("linear", "retnet", "gla", "deltanet", "gated_deltanet")
    seeds: int = 3
    size: int = 32
    fractions: tuple[float, ...] = (0.0625, 0.125, 0.25, 0.5, 0.75, 0.875, 1.0, 1.0625, 1.25, 1.5, 2.0, 4.0, 8.0)
    passes: tuple[int, ...] = (1, 16, 1024)


def runs(settings: Settings, _done: Done) -> list[Run]:
    """Runs for each mixer, kind of keys, number of passes and seed; only error-correcting rules get several passes."""
    wanted = []
    for mixer in settings.mixers:
        for keys in ("orthonormal", "random"):
            again = keys == "random" and erases(rule(mixer))
            wanted += [
                {"mixer": mixer, "keys": keys, "passes": passes, "size": settings.size, "seed": seed, "pairs": _pairs(settings, keys)}
                for passes in (settings.passes if again else settings.passes[:1])
                for seed in range(settings.seeds)
            ]
    return wanted


def _pairs(settings: Settings, keys: str) -> list[int]:
    return [max(1, round(f * settings.size)) for f in settings.fractions if f <= 1 or keys == "random"]


def measure(run: Run) -> Result:
    """Measure the share returned exactly, the share recognised, and the mean relative error, for each number of pairs."""
    r = rule(run["mixer"])
    if r is None:
        raise LeftOut("it writes no pairs of keys and values into one matrix")
    generator = torch.Generator().manual_seed(run["seed"])
    found: dict[str, list[float]] = {"exact": [], "known": [], "error": []}
    for n in run["pairs"]:
        k, v = pairs(n, run["size"], orthonormal=run["keys"] == "orthonormal", generator=generator)
        for name, value in returned(k, v, state(r, k, v, run["passes"])).items():
            found[name].append(value)
    return found


def rule(mixer: str) -> Recurrence | None:
    """Recurrence of ``mixer`` for random tokens, of which only the rule is used; None without a K x V state."""
    variant = variants.parse(mixer)
    if not mixers.info(variant.name).recurrent:
        return None  # a growing state overwrites no pair
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        made = mixers.create(variant.name, dim=64, **variant.options)
        x = torch.randn(1, 256, 64)
        try:
            r = made.recurrence(x, CallContext(x, returning=False))
        except NotImplementedError:
            return None
        if not _is_matrix(r, made(x, return_state=True)[1]):
            return None
        return replace(r, decay=None) if variant.name in _REBASED else r


def _is_matrix(r: Recurrence, kept: Mapping[str, Tensor]) -> bool:
    """True if the state ``kept`` has a matrix, and keys more than one channel; False for windows and for sums per channel."""
    (heads, values), keys = r.v.shape[2:], r.k.shape[3]
    wanted = ((keys, values), (heads * values, keys))  # the second is Mamba's
    return keys > 1 and any(t.shape[-2:] in wanted for t in kept.values())


def erases(r: Recurrence | None) -> bool:
    """True if the rule removes what a key reads before it writes the key's value."""
    return r is not None and (r.beta is not None or r.erase is not None)


def pairs(n: int, size: int, *, orthonormal: bool, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """n keys of length 1 and n Gaussian values, both [n, size] float64."""
    k, v = (torch.randn(n, size, generator=generator, dtype=torch.float64) for _ in range(2))
    k = torch.linalg.qr(k.T).Q.T if orthonormal else k / k.norm(dim=1, keepdim=True)
    return k, v


def state(r: Recurrence, k: Tensor, v: Tensor, passes: int = 1) -> Tensor:
    """The state [K, V] after ``passes`` over the pairs k, v [n, ...] by the rule of ``r``, with β = 1 and its slowest decay, if any."""
    k, v = (t.repeat(passes, 1)[None, :, None] for t in (k, v))  # [1, T, 1, ...]
    decay = None if r.decay is None else _slowest(r).to(k.dtype)
    beta = torch.ones(1, k.shape[1], 1, dtype=k.dtype) if erases(r) else None
    _, s = linear_attention(k, k, v, decay=decay, beta=beta, return_state=True)
    return s[0, 0]


def _slowest(r: Recurrence) -> Tensor:
    """The slowest decay, averaged over the tokens, [1]."""
    assert r.decay is not None
    over_tokens = r.decay if r.decay.ndim <= 2 else r.decay.mean((0, 1))  # [H] or [H, K]
    return over_tokens.max().reshape(1)


def returned(k: Tensor, v: Tensor, s: Tensor) -> dict[str, float]:
    """Compare k S with v: shares of exact values and of values whose nearest is their own, and the mean relative error."""
    o = k @ s
    error = (o - v).norm(dim=1) / v.norm(dim=1)
    nearest = torch.cdist(o, v).argmin(1)
    own = torch.arange(len(v))
    return {name: t.double().mean().item() for name, t in (("exact", error <= EXACT), ("known", nearest == own), ("error", error))}


def rows(_settings: Settings, done: Done) -> list[Row]:
    """A row for each mixer, kind of keys and number of passes; "curve" holds the shares at each number of pairs."""
    table = []
    for (mixer, keys, passes), group in grouped(done, "mixer", "keys", "passes").items():
        size, counts = group[0][0]["size"], group[0][0]["pairs"]
        row: Row = {"mixer": mixer, "rule": _rule_name(mixer), "keys": keys, "passes": passes, "bound": size}
        for name, enough in (("exact", 1.0), ("known", KNOWN)):
            row |= mean_and_spread(name, (most(counts, result[name], enough) for _, result in group))
        row["curve"] = [_point(n, [result for _, result in group], i) for i, n in enumerate(counts)]
        table.append({**row, "paper_says": None, "source": None, "agrees": None})
    return table


def most(counts: list[int], shares: list[float], enough: float) -> int:
    """The largest of ``counts`` up to which all shares are at least ``enough``; 0 if there is none."""
    reached = 0
    for n, value in zip(counts, shares, strict=True):
        if value < enough:
            break
        reached = n
    return reached


def _point(n: int, results: list[Result], i: int) -> Row:
    point: Row = {"pairs": n}
    for name in ("exact", "known", "error"):
        point |= mean_and_spread(name, (result[name][i] for result in results))
    return point


def _rule_name(mixer: str) -> str:
    r = rule(mixer)
    assert r is not None
    return " ".join([*(["decayed"] if r.decay is not None else []), "delta" if erases(r) else "additive"])


def charts(settings: Settings, table: list[Row]) -> list[Chart]:
    """Recognised and exact over the number of random pairs, after one pass and after the most."""
    drawn, names = [], [row["mixer"] for row in table]
    for passes in dict.fromkeys((settings.passes[0], settings.passes[-1])):
        for key, title in (("known", "recognised"), ("exact", "returned exactly")):
            shown = [row for row in table if row["keys"] == "random" and row["passes"] == passes]
            heading = Heading(
                f"{key}-{passes}",
                f"Pairs {title}, {passes:,} {'pass' if passes == 1 else 'passes'}",
                f"Random pairs are written into a state of {settings.size} x {settings.size}, then each key is read.",
            )
            listed = ", ".join(f"{variants.label(row['mixer'])} {number(row[key])}" for row in shown)
            found = f"Largest number of pairs returned: {listed}."
            points = [{**point, "mixer": row["mixer"]} for row in shown for point in row["curve"]]
            drawn.append(
                curves(heading, points, in_tokens("pairs", "pairs written"), share_of(key, f"share {title}"), found=found, names=names)
            )
    return [chart for chart in drawn if chart is not None]


STUDY = Study(
    title="How many pairs a state returns",
    question="Random key-value pairs are written into a K x V state by the recurrence itself, without training, and read again with the "
    "same keys. Of random values no state can return more than K exactly (K = 32, with --full 64); how many does each rule return?",
    quick=Settings(),
    full=Settings(seeds=5, size=64, passes=(1, 16, 4096)),
    runs=runs,
    measure=measure,
    rows=rows,
    columns=(
        Column("mixer", "mixer"), Column("rule", "rule"), Column("keys", "keys"), Column("passes", "passes", lambda n: f"{n:,}"),
        Column("exact", "pairs returned exactly", number, spread=True), Column("known", "pairs recognised", number, spread=True),
    ),
    charts=charts,
    notes=(
        (
            "No claim of a paper is compared: that a sum returns K orthonormal keys exactly (arXiv 2102.11174, section 4.1) and that no "
            "state returns more than K random values exactly follow from linear algebra."
        ),
        (
            "Of each mixer only the rule is used: a sum; a sum with the mean decay of the untrained layer's slowest channel; or the delta "
            "rule, which erases what its key reads (β = 1)."
        ),
        (
            f"Returned exactly: the largest number of pairs that all come back with a relative error of at most {EXACT:g}. Recognised: the "
            f"largest of which {KNOWN:.0%} are nearer to their own value than to any other that was written."
        ),
    ),
    alone=True,
)  # fmt: skip
