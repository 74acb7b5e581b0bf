"""Location of chunks and of their prepared operands, and TMA tiles that end with a chunk."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from linattn.ops.triton.hopper import tma
from linattn.ops.triton.hopper.common import described, locate
from linattn.ops.triton.hopper.operands import BLOCK, C
from linattn.ops.triton.tiles import CHANNEL


class Rows(NamedTuple):
    """Tensor of tokens and heads, with its strides."""

    base: Any
    token: Any
    head: Any


class Work(NamedTuple):
    """Work of a kernel: the chunks of each head."""

    places: Any  # number of chunks times heads
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
    """Tiles [C, COLUMNS] of ``rows`` tokens of ``heads`` of ``x`` :class:`Rows`, each with its own end.

    A first dimension of C rows ends with the tile's last row; a second one of the same stride moves this window to the token where the
    tile ends. The base is offset by the C rows that both dimensions count.
    """
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([1, 1, C, COLUMNS], gl.bfloat16)
    base = x.base - C * x.token.to(gl.int64)
    return tma.describe(base, [heads, rows + 1, C, WIDTH], [x.head, x.token, x.token, 1], [1, 1, C, COLUMNS], layout)


@gluon.jit
def dense(base, rows, heads, WIDTH: gl.constexpr, COLUMNS: gl.constexpr):
    """``ragged`` tiles of a contiguous tensor."""
    return ragged(Rows(base, heads * WIDTH, WIDTH), rows, heads, WIDTH, COLUMNS)


@gluon.jit
def fetch(source, here, bar, to, WIDTH: gl.constexpr):
    """Start to load a tile of a chunk."""
    tma.load(source, [here.head, here.first + here.rows, C - here.rows, 0], bar, to.reshape((1, 1, C, WIDTH)))


@gluon.jit
def send(to, here, block, tile):
    """Start to store a block of channels of a chunk."""
    tma.store(to, [here.head, here.first + here.rows, C - here.rows, block * BLOCK], tile.reshape((1, 1, C, BLOCK)))


@gluon.jit
def chunk(place, work, PACKED: gl.constexpr):
    """The :class:`Chunk` of a head at ``place``."""
    slot = place // work.heads
    _, first, last, _, _, _ = locate(slot, work.cu, work.sequences, work.tokens, C, PACKED)
    return Chunk(place - slot * work.heads, first, last - first)


@gluon.jit
def of_states(base, places, K: gl.constexpr, V: gl.constexpr, SPLIT: gl.constexpr, ROWS: gl.constexpr):
    """Tiles [ROWS, V] of states [K, SPLIT * V], each shared by SPLIT of ``places`` with V columns each: see ``state_at``."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, V], gl.bfloat16)
    return tma.describe(base, [places // SPLIT * K, SPLIT * V], [SPLIT * V, 1], [ROWS, V], layout)


@gluon.jit
def state_at(place, row, K: gl.constexpr, V: gl.constexpr, SPLIT: gl.constexpr):
    """TMA coordinates of the state of ``place`` from ``row`` on."""
    return [place // SPLIT * K + row, place % SPLIT * V]


@gluon.jit
def prepared(base, place, rows, C: gl.constexpr, WIDTH: gl.constexpr):
    """Prepared tiles [C, WIDTH], from the one at ``place`` (chunk and head) on."""
    return described(base + place * C * WIDTH, rows, WIDTH, WIDTH, C, WIDTH)


@gluon.jit
def beside(base, column, token, rows, heads, C: gl.constexpr):
    """Tiles [C, C] of a tensor [B, T, H, 2 C] from ``column`` and ``token`` (times heads, and head) on: see prepare_head.py."""
    return described(base + token * (2 * C) + column, rows, heads * (2 * C), C, C, C)


@gluon.jit
def decayed(faded, place, tile_rows, raw, time, token, at_head, rows, C: gl.constexpr, K: gl.constexpr, DECAY: gl.constexpr):
    """Keys, queries or writes of a head: prepared ones with a decay per channel, else unscaled ones from token ``time`` on."""
    if DECAY == CHANNEL:
        return prepared(faded, place, tile_rows, C, K)
    else:
        return described(raw + time * token + at_head, rows, token, K, C, K)
