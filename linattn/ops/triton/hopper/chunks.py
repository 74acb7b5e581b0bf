"""Chunks as the kernels for Hopper bring them: where each lies, what was prepared of it, and tiles that end with it."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from linattn.ops.triton.hopper import tma
from linattn.ops.triton.hopper.common import described, locate
from linattn.ops.triton.hopper.operands import BLOCK, C
from linattn.ops.triton.tiles import CHANNEL


class Rows(NamedTuple):
    """A tensor of tokens and heads, by its strides."""

    base: Any
    token: Any
    head: Any


class Work(NamedTuple):
    """Work of a kernel: the chunks of each head."""

    places: Any  # chunks times heads
    cu: Any
    sequences: Any
    tokens: Any
    heads: Any


class Chunk(NamedTuple):
    """Location of the tokens of a head; an empty slot has no ``rows``."""

    head: Any
    first: Any
    rows: Any


@gluon.jit
def ragged(x, rows, heads, WIDTH: gl.constexpr, COLUMNS: gl.constexpr):
    """Tiles [C, COLUMNS] of ``rows`` tokens of ``heads`` of ``x`` :class:`Rows`, each cut off at an end of its own.

    The last of a tile's n rows is the last of a dimension of C; another of the same stride moves that window to the token where
    the tile ends. The base steps back by the C rows that both count.
    """
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([1, 1, C, COLUMNS], gl.bfloat16)
    base = x.base - C * x.token.to(gl.int64)
    return tma.describe(base, [heads, rows + 1, C, WIDTH], [x.head, x.token, x.token, 1], [1, 1, C, COLUMNS], layout)


@gluon.jit
def dense(base, rows, heads, WIDTH: gl.constexpr, COLUMNS: gl.constexpr):
    """``ragged`` tiles of a tensor that has no gaps."""
    return ragged(Rows(base, heads * WIDTH, WIDTH), rows, heads, WIDTH, COLUMNS)


@gluon.jit
def fetch(source, here, bar, to, WIDTH: gl.constexpr):
    """Begin to bring a tile of a chunk."""
    tma.load(source, [here.head, here.first + here.rows, C - here.rows, 0], bar, to.reshape((1, 1, C, WIDTH)))


@gluon.jit
def send(to, here, block, tile):
    """Begin to write a block of channels of a chunk."""
    tma.store(to, [here.head, here.first + here.rows, C - here.rows, block * BLOCK], tile.reshape((1, 1, C, BLOCK)))


@gluon.jit
def chunk(place, work, PACKED: gl.constexpr):
    """The :class:`Chunk` of a head at ``place``."""
    slot = place // work.heads
    _, first, last, _, _, _ = locate(slot, work.cu, work.sequences, work.tokens, C, PACKED)
    return Chunk(place - slot * work.heads, first, last - first)


@gluon.jit
def of_states(base, places, K: gl.constexpr, V: gl.constexpr, SPLIT: gl.constexpr, ROWS: gl.constexpr):
    """Tiles [ROWS, V] of states [K, SPLIT * V], each of which is that of SPLIT of ``places``, so many columns each: see ``state_at``."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, V], gl.bfloat16)
    return tma.describe(base, [places // SPLIT * K, SPLIT * V], [SPLIT * V, 1], [ROWS, V], layout)


@gluon.jit
def state_at(place, row, K: gl.constexpr, V: gl.constexpr, SPLIT: gl.constexpr):
    """TMA coordinates of the state of ``place`` from ``row`` on."""
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
