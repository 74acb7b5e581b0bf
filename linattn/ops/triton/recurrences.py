"""Recurrences of the elementwise kernels: the passage of a state over tokens, and the composition of spans of tokens.

The ``kind`` of a recurrence:
    "sum"      h = exp(log) h + x
    "maximum"  m = max(log + m, x)
    "linear"   g = factor g + x, the gradient of "maximum", whose factors are 0, 1/2 and 1
"""

import os

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
NEAR = tl.constexpr(-0.125)
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _exp2(x):
    """2 ** x with subnormal results flushed to 0, which saves three instructions."""
    if INTERPRETED:
        y = tl.exp2(x)
    else:
        y = tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    return y


@triton.jit
def held_form(kind: tl.constexpr, log):
    """Decay in the form in which it is applied to states.

    For "sum" the form is exp(log) or, near 1, its distance from 1, with the sign bit set even for a 0. A factor near 1 would be
    rounded in the same direction at every step, unlike its distance from 1.
    """
    if kind == "sum":
        size = tl.abs(log)
        less = size * (-1.0 + size * (1 / 2 + size * (-1 / 6 + size * (1 / 24 - size * (1 / 120)))))
        log = tl.where(log > NEAR, less, _exp2(log * LOG2E))
    return log


@triton.jit
def join(kind: tl.constexpr, state, held, near, later):
    """Apply the decay ``held`` to ``state`` and add ``later``. ``near``: True if ``held`` is a distance from 1, by its sign bit."""
    if kind == "sum":
        joined = held * state + later
        return tl.where(near, joined + state, joined)
    elif kind == "maximum":
        return tl.maximum(held + state, later, propagate_nan=tl.PropagateNan.ALL)
    else:
        return held * state + later


@triton.jit
def is_near(held):
    return held.to(tl.int32, bitcast=True) < 0


@triton.jit
def longer(kind: tl.constexpr, total, log):
    """Decay over one token or span more: a sum of logarithms, or a product of factors."""
    if kind == "linear":
        return total * log
    else:
        return total + log


@triton.jit
def nothing(kind: tl.constexpr):
    return float("-inf") if kind == "maximum" else 0.0


@triton.jit
def kept(kind: tl.constexpr):
    """Total decay of no tokens."""
    return 1.0 if kind == "linear" else 0.0


@triton.jit
def reset(kind: tl.constexpr):
    return 0.0 if kind == "linear" else float("-inf")


@triton.jit
def past(kind: tl.constexpr, state, total, own):
    """Pass ``state`` over tokens with the decay ``total``. After a reset it is 0, even if it was NaN."""
    return tl.where(total == reset(kind), own, join(kind, state, held_form(kind, total), total > NEAR, own))


@triton.jit
def _two(kind: tl.constexpr, total, own, later_total, later_own):
    return longer(kind, total, later_total), past(kind, own, later_total, later_own)


@triton.jit
def _four(kind: tl.constexpr, total, own, before_total, before_own, later_total, later_own, later_before_total, later_before_own):
    return _two(kind, total, own, later_total, later_own) + _two(kind, total, own, later_before_total, later_before_own)


@triton.jit
def _two_sums(a, b, c, d):
    return _two("sum", a, b, c, d)


@triton.jit
def _two_maxima(a, b, c, d):
    return _two("maximum", a, b, c, d)


@triton.jit
def _two_products(a, b, c, d):
    return _two("linear", a, b, c, d)


@triton.jit
def _four_sums(a, b, c, d, e, f, g, h):
    return _four("sum", a, b, c, d, e, f, g, h)


@triton.jit
def _four_maxima(a, b, c, d, e, f, g, h):
    return _four("maximum", a, b, c, d, e, f, g, h)


@triton.jit
def _four_products(a, b, c, d, e, f, g, h):
    return _four("linear", a, b, c, d, e, f, g, h)


@triton.jit
def up_to(kind: tl.constexpr, total, own):
    """Cumulative ``total`` and ``own`` [n, DB] of n consecutive pieces, each included."""
    if kind == "sum":
        return tl.associative_scan((total, own), 0, _two_sums)
    elif kind == "maximum":
        return tl.associative_scan((total, own), 0, _two_maxima)
    else:
        return tl.associative_scan((total, own), 0, _two_products)


@triton.jit
def up_to_and_before(kind: tl.constexpr, total, own):
    """``up_to`` of each piece, and of the piece before it, computed together."""
    none, empty = tl.full(total.shape, kept(kind), tl.float32), tl.full(total.shape, nothing(kind), tl.float32)
    pairs = (total, own, none, empty)
    if kind == "sum":
        return tl.associative_scan(pairs, 0, _four_sums)
    elif kind == "maximum":
        return tl.associative_scan(pairs, 0, _four_maxima)
    else:
        return tl.associative_scan(pairs, 0, _four_products)
