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
from linattn.ops.triton.hopper.names import barrier, fence_async_shared
from linattn.ops.triton.hopper.operands import BLOCK


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
def unsettled(start, settled, blocks):
    """First unfinished block of this program from ``start`` on; ``blocks`` if there is none."""
    WARPS: gl.constexpr = gl.num_warps()
    ahead = gl.arange(0, 32, gl.BlockedLayout([1], [32], [WARPS], [0])) * gl.num_programs(0)
    found = blocks
    while start < blocks:
        here = start + ahead
        done = gl.load(settled + here, mask=here < blocks, other=1)
        found = gl.min(gl.where(done == 0, here, blocks), 0)
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
        item = unsettled(item + gl.num_programs(0), call.settled, blocks)
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
