"""Anchors of a chunk with a decay per channel: the binary orders to which its tokens are scaled, so that one product pairs many of them.

Decays are at most 0: no token is farther from half of a block's total, in binary orders, than that half. So queries and keys of a block
whose total is at most twice :func:`within_range` are scaled to it, with factors above 1 on one side that the other side compensates.
A chunk has one such anchor in each channel, or two, one for each half. Late queries then meet early keys that are brought on to the late
anchor by a factor of at most 1. Where this becomes 0 the weight is far below the rounding of any sum.

Orders are added before they become factors, or a factor is applied as its root twice: 2^100 · 2^-150 must not be 0.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from linattn.ops.triton.tiles import sums

TAME = tl.constexpr(40.0)  # binary orders: a factor of 2^-40 beside small gradients is still far from the end of float32
WIDEST = tl.constexpr(100.0)  # the same of bfloat16: sums up to 2^27 times a factor of 2^100 are finite, 2^-100 leaves 2^-26 normal


class Halves(NamedTuple):
    """Binary orders [BK] of the halves of a chunk."""

    early: Any
    late: Any


@triton.constexpr_function
def within_range(kind: tl.dtype) -> tl.constexpr:
    """Most binary orders from a token to its anchor.

    Factors of float32 are exact to 2^-24 of their exponent: for 1e-5 that must be small.
    """
    return TAME if kind == tl.float32 else WIDEST


@triton.jit
def is_late(rows):
    """[C], True in the late half of a chunk."""
    C: tl.constexpr = rows.shape[0]
    return rows >= C // 2


@triton.jit
def apart(rows):
    """[C, C], True for pairs of tokens in different halves."""
    late = is_late(rows)
    return late[:, None] != late[None, :]


@triton.jit
def orders_of_halves(a, rows):
    """Binary orders [BK] of the early and of the late half from those of each token ``a`` [C, BK]."""
    late = is_late(rows)[:, None]
    return Halves(tl.sum(tl.where(late, 0.0, a), 0), tl.sum(tl.where(late, a, 0.0), 0))


@triton.jit
def in_range(halves, ANCHORS: tl.constexpr, kind: tl.constexpr):
    """True if no token in any channel is out of range of its anchor."""
    orders = halves.early + halves.late if ANCHORS == 1 else tl.minimum(halves.early, halves.late)
    return tl.min(orders, 0) >= -2 * within_range(kind)


@triton.jit
def from_anchor(a, rows, ANCHORS: tl.constexpr, kind: tl.constexpr):
    """Orders [C, BK] from the anchor to each token: half of the decays up to the token less half of those after it."""
    half = tl.where(rows[:, None] >= rows[None, :], 0.5, -0.5)
    return sums(tl.where(apart(rows), 0.0, half) if ANCHORS == 2 else half, a, kind)


@triton.jit
def to_edge(a, halves, rows, ANCHORS: tl.constexpr, READS: tl.constexpr):
    """``a`` [C, BK], scaled to the tokens' anchors, brought on to the start of the chunk (``READS``) or to its end."""
    total = halves.early + halves.late
    if ANCHORS == 2:
        near = halves.early if READS else halves.late
        near_root = tl.exp2(near * 0.25)[None, :]
        far_root = tl.exp2((total + near) * 0.25)[None, :]
        late = is_late(rows)[:, None]
        root = tl.where(late, far_root, near_root) if READS else tl.where(late, near_root, far_root)
        a = a * root * root
    else:
        a *= tl.exp2(total * 0.5)[None, :]
    return a


@triton.jit
def to_late_anchor(factor, halves):
    """``factor`` [C, BK] of early tokens to their anchor, brought on to the late one."""
    root = tl.exp2((halves.early + halves.late) * 0.25)[None, :]
    return factor * root * root
