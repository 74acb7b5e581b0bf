"""Decays per head in a scan: the factors of a chunk, and how far a state reaches.

The delta rule's preparation stores the factors of each chunk (:func:`keep_factors`), which its scans read several times.

What a segment's first tokens write has vanished at its end if decays are strong: the scans that find the ends of segments leave such
chunks out. The plain rule sums decays. The delta rule sums a bound for each chunk, stored beside its factors: long keys let a state grow,
whatever its decays. The kernels for Hopper have their own such sums.
"""

from __future__ import annotations

import triton
import triton.language as tl

from linattn.ops.triton.tiles import LOG2E, weight, whole

GONE = tl.constexpr(-126.0)  # binary exponent at the lower end of float32's normal numbers
SPAN = tl.constexpr(1024)  # bounds that are summed at once


@triton.jit
def factors_of(d, BEFORE: tl.constexpr, BITS: tl.constexpr):
    """Sums of a chunk's decays ``d`` [C], factors from its start to each token and from each to its end [C, 1], its factor."""
    d = d.to(tl.float32)
    steps = whole(d, BITS)
    sums = tl.cumsum(steps, 0)
    read_at = weight((sums - steps) if BEFORE else sums, BITS)[:, None]
    return sums, read_at, weight(tl.sum(steps, 0) - sums, BITS)[:, None], tl.exp2(tl.sum(d, 0) * LOG2E)


@triton.jit
def keep_factors(kept, place, rows, d, strength, squares, BITS: tl.constexpr):
    """Store the factors of a chunk of the delta rule and a bound of that of its state, in ``kept`` [chunks, H, 2C + 2].

    ``squares`` are kᵀk of its tokens, see :func:`bound`.
    """
    C: tl.constexpr = rows.shape[0]
    kept += place * (2 * C + 2)
    _, read_at, to_end, total = factors_of(d, False, BITS)
    tl.store(kept + rows[:, None], read_at)
    tl.store(kept + C + rows[:, None], to_end)
    tl.store(kept + 2 * C, total)
    tl.store(kept + 2 * C + 1, bound(strength, squares, whole(d, BITS), BITS))


@triton.jit
def kept_factors(kept, place, rows):
    """Load the factors of a chunk: from its start to each token and from each to its end [C, 1], its own."""
    C: tl.constexpr = rows.shape[0]
    kept += place * (2 * C + 2)
    return tl.load(kept + rows)[:, None], tl.load(kept + C + rows)[:, None], tl.load(kept + 2 * C)


@triton.jit
def chunks_in_reach(decay, step, kept, place, heads, tokens, C: tl.constexpr, BACK: tl.constexpr):
    """Number of chunks of a segment of ``tokens`` from its start on (``BACK``: from its end back) that a scan's result depends on.

    ``decay`` is that of the first token. ``kept`` has bounds, of which ``place`` is that of the first chunk; without it decays are summed.
    Also returns whether a state vanishes within the segment.
    """
    count = (tokens + C - 1) // C
    if kept is None:
        near, vanishes = reach(decay, step, tokens, BACK, LOG2E, False)
        if BACK:
            count -= (tokens - near) // C
        else:
            count = (near + C - 1) // C
    else:
        ROW: tl.constexpr = 2 * C + 2
        count, vanishes = reach(kept + place * ROW + ROW - 1, heads * ROW, count, BACK, 1.0, True)
    return count, vanishes


@triton.jit
def reach(bounds, step, count, BACK: tl.constexpr, ORDERS: tl.constexpr, GROWS: tl.constexpr):
    """Number of chunks or tokens from the first (``BACK``: from the last back), at most ``count``, through which a state does not vanish.

    ``bounds`` has for each, ``step`` apart, an upper bound of the log factor of a state, in units of ``ORDERS`` binary exponents. If some
    are positive (``GROWS``) a state may be small in between: all are read then. Also returns whether the state vanishes through all.
    """
    passed = 0  # as many leave of the state more than nothing
    orders = 0.0
    start = 0
    while start < count:
        n = start + tl.arange(0, SPAN)
        at = count - 1 - n if BACK else n
        x = tl.load(bounds + at.to(tl.int64) * step, mask=n < count, other=0.0).to(tl.float32) * ORDERS
        gone = orders + tl.cumsum(x, 0) <= GONE  # False of a NaN
        passed = tl.maximum(passed, tl.max(tl.where(gone | (n >= count), 0, n + 1), 0))
        orders += tl.sum(x, 0)
        start += SPAN
        if not GROWS:
            start = tl.where(passed < start, count, start)
    return tl.minimum(passed + 1, count), passed < count


@triton.jit
def bound(strength, squares, steps, BITS: tl.constexpr):
    """Upper bound of the binary exponent of the factor by which a chunk of the delta rule changes a state.

    A token multiplies a state by its decay and by I - β k kᵀ, whose norm is at most the larger of 1 and |1 - β kᵀk|; ``squares`` are kᵀk.
    """
    growth = tl.log2(tl.maximum(tl.abs(1.0 - strength * squares), 1.0))
    return tl.sum(growth + steps.to(tl.float32) * (2.0**-BITS), 0)
