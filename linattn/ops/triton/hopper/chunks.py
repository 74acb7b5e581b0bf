"""Chunks as the kernels for Hopper bring them: where each lies, what was prepared of it, and tiles that end with it."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from linattn.ops.triton.hopper import tma
from linattn.ops.triton.hopper.common import described, locate
from linattn.ops.triton.tiles import CHANNEL


@gluon.jit
def ragged(base, rows, token, heads, head, C: gl.constexpr, WIDTH: gl.constexpr):
    """Tiles [C, WIDTH] of ``rows`` tokens of ``heads``, each cut off at an end of its own.

    The last of a tile's n rows is the last of a dimension of C; another of the same stride moves that window to the token where
    the tile ends. ``base`` steps back by the C rows that both count.
    """
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([1, 1, C, WIDTH], gl.bfloat16)
    base -= C * token.to(gl.int64)
    return tma.describe(base, [heads, rows + 1, C, WIDTH], [head, token, token, 1], [1, 1, C, WIDTH], layout)


@gluon.jit
def fetch(source, head, first, rows, bar, to, C: gl.constexpr, WIDTH: gl.constexpr):
    tma.load(source, [head, first + rows, C - rows, 0], bar, to.reshape((1, 1, C, WIDTH)))


@gluon.jit
def chunk(place, cu, sequences, tokens, heads, C: gl.constexpr, PACKED: gl.constexpr):
    """Head, first token and number of tokens of a chunk; none of an empty slot."""
    slot = place // heads
    _, first, last, _, _, _ = locate(slot, cu, sequences, tokens, C, PACKED)
    return place - slot * heads, first, last - first


@gluon.jit
def of_states(base, places, K: gl.constexpr, V: gl.constexpr, SPLIT: gl.constexpr, ROWS: gl.constexpr, layout: gl.constexpr):
    """Tiles [ROWS, V] of states [K, SPLIT * V], each of which is that of SPLIT of ``places``, so many columns each: see ``state_at``."""
    return tma.describe(base, [places // SPLIT * K, SPLIT * V], [SPLIT * V, 1], [ROWS, V], layout)


@gluon.jit
def state_at(place, row, K: gl.constexpr, V: gl.constexpr, SPLIT: gl.constexpr):
    """Where the state of ``place`` lies, from ``row`` on."""
    return [place // SPLIT * K + row, place % SPLIT * V]


@gluon.jit
def prepared(base, place, rows, C: gl.constexpr, WIDTH: gl.constexpr):
    """The tiles [C, WIDTH] that prepare made, from the one at ``place`` (chunk and head) on."""
    return described(base + place * C * WIDTH, rows, WIDTH, WIDTH, C, WIDTH)


@gluon.jit
def decayed(faded, place, tile_rows, raw, time, token, at_head, rows, C: gl.constexpr, K: gl.constexpr, DECAY: gl.constexpr):
    """Keys, queries or writes of a head: per channel prepared, else as they are, from token ``time`` on."""
    if DECAY == CHANNEL:
        return prepared(faded, place, tile_rows, C, K)
    else:
        return described(raw + time * token + at_head, rows, token, K, C, K)
