"""Decays per channel, a block of channels of a chunk at a time: from memory to tiles for sums, and their gradients back.

Consecutive tokens settle if by channel their decays sum to at most :data:`SPAN` binary orders: then queries and keys can be scaled to the
middle of these orders, by factors of 2^-100 to 2^100, and one product serves all their pairs. bfloat16 and float32 end at 2^-126 and 2^128.
prepare.py writes for each chunk and block of channels ``settled``, of how many tokens the blocks settle: 64, 32 or 0.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from linattn.ops.triton.hopper.chunks import Chunk, chunk
from linattn.ops.triton.hopper.operands import BLOCK, NATURAL_RESET, C, add_two, keep_halves
from linattn.ops.triton.tiles import LOG2E

SPAN = gl.constexpr(200.0)
ROWS = gl.constexpr(gl.BlockedLayout([4, 4], [2, 16], [4, 1], [1, 0]))  # [C / 2, BLOCK] of four warps, split by tokens


@gluon.constexpr_function
def columns(warps, width):
    """[C / 2, BLOCK] with all tokens of a channel in one warp, and ``width`` channels in a thread."""
    return gl.BlockedLayout([1, width], [warps * width // 2, 64 // (warps * width)], [1, warps], [1, 0])


@gluon.jit
def halves(decays, here, block, layout: gl.constexpr):
    """Load the decays [C / 2, BLOCK] of both halves of a chunk's block; 0 past the end."""
    HALF: gl.constexpr = C // 2
    stride = decays.token // 4 * 4
    row = gl.arange(0, HALF, gl.SliceLayout(1, layout))
    channel = block * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(0, layout))
    start = decays.base + here.first.to(gl.int64) * stride + (here.head // decays.split).to(gl.int64) * (decays.head // 4 * 4)
    where = start + row[:, None] * stride + channel[None, :]
    early = gl.load(where, mask=(row < here.rows)[:, None], other=0.0)
    return early, gl.load(where + HALF * stride, mask=(row < here.rows - HALF)[:, None], other=0.0)


@gluon.jit
def halves_at(decays, place, block, work, sizes, layout: gl.constexpr):
    """``halves`` of the chunk at ``place``; 0 past the last."""
    here = chunk(place, work, sizes.PACKED)
    rows = gl.where(place < work.places, here.rows, 0)
    return halves(decays, Chunk(here.head, here.first, rows), block, layout)


@gluon.jit
def lay_out(early, late, high, low, at, LOW: gl.constexpr):
    """Store a block's decays in the ``at``-th tiles; returns by channel half the sum of the log2 decays of the chunk."""
    early = gl.maximum(early.to(gl.float32), NATURAL_RESET)
    late = gl.maximum(late.to(gl.float32), NATURAL_RESET)
    keep_halves(early, late, high, low, at, LOW)
    of_early, of_late = gl.reduce((early, late), 0, add_two)
    return (of_early + of_late) * (0.5 * LOG2E)


@gluon.jit
def lay_out_orders(early, late, high, low, LOW: gl.constexpr):
    """Store a block's decays in tiles, as log2 if split in two bfloat16 numbers; returns both halves as stored."""
    early = gl.maximum(early.to(gl.float32), NATURAL_RESET)
    late = gl.maximum(late.to(gl.float32), NATURAL_RESET)
    if LOW:
        early = early * LOG2E
        late = late * LOG2E
    keep_halves(early, late, high, low, 0, LOW)
    return early, late


@gluon.jit
def settles(settled, item, work, sizes):
    """Tokens of the blocks that settle in the ``item``-th block of channels of all chunks and heads."""
    BLOCKS: gl.constexpr = sizes.K // BLOCK
    place = item // BLOCKS
    return gl.load(settled + place // sizes.SPLIT * BLOCKS + item % BLOCKS, mask=place < work.places, other=-1)


@gluon.jit
def save_gradients(to, dd, here, token, block, work, K: gl.constexpr):
    """Write the gradients ``dd`` [C, BLOCK] of the decays of a chunk's ``token`` [C, 1]."""
    channel = gl.arange(0, BLOCK, gl.SliceLayout(0, dd.type.layout))
    where = to + (here.first.to(gl.int64) + token) * work.heads * K + here.head * K + block * BLOCK + channel[None, :]
    gl.store(where, dd.to(to.dtype.element_ty), mask=token < here.rows)
