"""Helpers of the level kernels: the blocks of channels that they handle, and the pairs of tokens in blocks of each size.

Pairs of tokens factor at the middle of blocks of 64, 32, 16, ... tokens (see tiles.py), with all factors at most 1. At each size a token
is a query in the late half of its block or a key in the early one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from linattn.ops.triton.hopper import tma
from linattn.ops.triton.hopper.call import Loaded
from linattn.ops.triton.hopper.chunks import chunk
from linattn.ops.triton.hopper.common import barriers
from linattn.ops.triton.hopper.decays import settles
from linattn.ops.triton.hopper.names import barrier, fence_async_shared
from linattn.ops.triton.hopper.operands import BLOCK, C, left


class Place(NamedTuple):
    """Block of channels of a chunk of a head; ``place`` is its number among all."""

    place: Any
    block: Any
    chunk: Any  # its :class:`chunks.Chunk`


class Tiles(NamedTuple):
    """Shared memory."""

    loaded: Loaded  # q and k, whose memory is reused for their gradients
    high: Any  # decays
    low: Any
    met: Any  # queries and keys scaled for the current size of blocks
    g: Any  # cotangents by values
    faded: Any  # by channel, the decay of the whole chunk
    past: Any  # by channel, the product of the state and its cotangent


@gluon.jit
def unsettled(start, settled, blocks, work, sizes):
    """First block of this program, from ``start`` on, of which blocks of ``sizes.SETTLED`` tokens settle; ``blocks`` if there is none."""
    WARPS: gl.constexpr = gl.num_warps()
    ahead = gl.arange(0, 32, gl.BlockedLayout([1], [32], [WARPS], [0])) * gl.num_programs(0)
    found = blocks
    while start < blocks:
        here = start + ahead
        found = gl.min(gl.where(settles(settled, here, work, sizes) == sizes.SETTLED, here, blocks), 0)
        start = gl.where(found < blocks, blocks, start + 32 * gl.num_programs(0))
    return found


@gluon.jit
def each_unsettled(make: gl.constexpr, item, call, work, sources, tiles, sizes):
    """Compute the gradients of each unfinished block of this program from ``item`` on by ``make``."""
    BLOCKS: gl.constexpr = sizes.K // BLOCK
    blocks = work.places * BLOCKS
    bars = barriers(1, 1)
    fence_async_shared()
    barrier()
    phase = 0
    while item < blocks:
        place = item // BLOCKS
        here = chunk(place, work, sizes.PACKED)
        if here.rows > 0:
            make(Place(place, item % BLOCKS, here), phase, bars.index(0), call, work, sources, tiles, sizes)
            phase ^= 1
        item = unsettled(item + gl.num_programs(0), call.settled, blocks, work, sizes)
    tma.store_wait(0)


@gluon.jit
def in_range(first, count, other):
    """[C, C]: mask of columns in registers with two bits per pair of columns, and byte selectors, for ``cut`` and ``ones``.

    A row's columns from ``first`` on, ``count`` of them (at most 32), are bits of 64; a thread has two of each byte, expanded to bytes.
    """
    bits = ((gl.full_like(count, 1).to(gl.uint64) << count.to(gl.uint64)) - 1) << first.to(gl.uint64)
    bits = bits >> (other & 6).to(gl.uint64)
    half = gl.where(other < 32, bits & 0xFFFFFFFF, bits >> 32).to(gl.uint32).to(gl.int32, bitcast=True)
    return (half & 0x01010101) * 255, (half >> 1 & 0x01010101) * 255, ((other >> 3) & 3) * 0x1111 + 0x4400


@gluon.jit
def first_size(zero, sizes):
    """The first m of the loop over steps; in a loop of three, a constant would let the compiler unroll it and spill."""
    return C // 2 + zero if sizes.SETTLED > 0 else C // 2


@gluon.jit
def last_size(sizes):
    """The last m of the loop over steps."""
    return C // 8 if sizes.SETTLED > 0 else 2 if sizes.BEFORE else 1


@gluon.jit
def roles(token, m, sizes):
    """Step m of the loop: masks of rows, those that are queries and those whose partners' tile has queries, and the range of partners.

    The range is the first and the number of columns, for ``in_range``.
    """
    if sizes.SETTLED > 0:
        level, reads = m == C // 2, m == C // 4
        late = gl.where(level, token & m, gl.where(reads, 1, 0)) != 0
        met_late = gl.where(level, token & m, gl.where(reads, 0, 1)) != 0
        within = token & (C // 2 - 1)
        first = gl.where(level, (token ^ m) & -m, gl.where(reads, token - within, gl.minimum(token + 1, C - 1)))
        count = gl.where(level, m, gl.where(reads, within, C // 2 - 1 - within))
    else:
        late = (token & m) != 0
        met_late = late
        first = (token ^ m) & -m
        count = token * 0 + m
    return late, met_late, first, count


@gluon.jit
def cut(a, span):
    """``a`` in range, else 0."""
    evens, odds, where = span
    return gl.inline_asm_elementwise(
        "{ .reg .b32 t; prmt.b32 t, $2, $4, $6; and.b32 $0, $1, t; }", "=r,r,r,r,r,r,r,r", [a, evens, odds, where], gl.bfloat16, True, 2
    )


@gluon.jit
def ones(span):
    """1 in range, else 0."""
    evens, odds, where = span
    return gl.inline_asm_elementwise(
        "{ .reg .b32 t; prmt.b32 t, $1, $3, $5; and.b32 $0, t, 0x3f803f80; }", "=r,r,r,r,r,r,r", [evens, odds, where], gl.bfloat16, True, 2
    )


@gluon.jit
def choose(which, a, b):
    """``a`` if ``which`` has all bits set, ``b`` if none."""
    return gl.inline_asm_elementwise("lop3.b32 $0, $1, $2, $3, 0xCA;", "=r,r,r,r", [which, a, b], gl.bfloat16, True, 2)


@gluon.jit
def up_to_middle(token, m, other, sizes, BEFORE: gl.constexpr):
    """[C, C], a left operand for sums of decays between a token and the middle of its block of 2m tokens; in later steps where halves
    settle, from where half of the sum of a half is reached up to each token. Of queries without their own decay if they read ``BEFORE``.
    """
    if sizes.SETTLED > 0:
        if m == C // 2:
            picked = level(token, m, other, BEFORE)
        else:
            signed = gl.where(other < token if BEFORE else other <= token, 0.5, -0.5)
            picked = left(gl.where((token ^ other) < C // 2, signed, 0.0))
    else:
        picked = level(token, m, other, BEFORE)
    return picked


@gluon.jit
def level(token, m, other, BEFORE: gl.constexpr):
    """[C, C]: 1 for decays between a token and the middle of its block of 2m."""
    upper = (token & m) != 0
    middle = (token | (2 * m - 1)) - m
    count = gl.where(upper, token - middle - (1 if BEFORE else 0), middle - token)
    return left(ones(in_range(gl.where(upper, middle, token) + 1, count, other)))
