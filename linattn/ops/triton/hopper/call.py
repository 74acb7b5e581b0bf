"""Arguments of the kernels of gradients, grouped for the device functions.

Tuples preserve constants and None in their fields as long as they are passed on, not assigned. The order of the fields is that in
which they are passed to specialised warps.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from linattn.ops.triton.hopper.chunks import Rows, dense, of_states, ragged


class Sizes(NamedTuple):
    """Constants."""

    K: Any
    V: Any
    SPLIT: Any  # parts into which a head is split, each with V values
    BEFORE: Any  # queries read the state before the token's decay
    PACKED: Any
    DDECAY: Any  # True if the decay's gradient is computed
    LOW: Any  # True if decays are split in two bfloat16 numbers
    STAGES: Any
    SETTLED: Any = 0  # tokens of the blocks that settle in those blocks of channels that a kernel computes


class Decays(NamedTuple):
    """Rows of decays, with the number of heads that share them."""

    base: Any
    token: Any
    head: Any
    split: Any


class Strengths(NamedTuple):
    """Strengths of the delta rule, the place of their gradients, and the number of heads that share them."""

    base: Any
    token: Any
    head: Any
    to: Any
    heads: Any
    split: Any


class Call(NamedTuple):
    """Tensors that a kernel reads and writes. With the delta rule, ``x`` are cotangents of the writes ``u``; else of the reads."""

    q: Rows
    k: Rows
    v: Rows
    read: Rows
    write: Rows
    do: Rows
    group: Any
    scale: Any
    decays: Decays
    strengths: Strengths
    bonus: Any
    u: Any  # values written by a rule
    x: Any
    states: Any
    dstates: Any
    dq: Any
    dk: Any
    dread: Any
    dwrite: Any
    ddecay: Any
    dbonus: Any
    settled: Any  # of how many tokens the blocks of a chunk settle, by block of channels, see decays.py
    tokens: Any  # of all sequences


class Loaded(NamedTuple):
    """Operands of the gradients, in global memory for TMA or in shared memory."""

    q: Any
    k: Any
    v: Any
    do: Any
    x: Any
    states: Any
    dstates: Any


class Sources(NamedTuple):
    """Tensors that TMA reads and writes."""

    loaded: Loaded
    dq: Any
    dk: Any


class Tiles(NamedTuple):
    """Shared memory of warps that specialise."""

    loaded: Loaded
    high: Any  # decays, then the summands past a token
    low: Any
    factors: Any  # by channel, half of the orders of the chunk, and their weight
    hats: Any  # scaled queries and keys, then gradients
    sums: Any  # the summands across a token


class Bars(NamedTuple):
    """Barriers: full and empty are the places of values and cotangents, of queries and keys, states, decays, and of sums for decays."""

    full: Any
    empty: Any
    pair_full: Any
    pair_empty: Any
    state_full: Any
    state_empty: Any
    decay_full: Any
    decay_empty: Any
    scaled: Any  # scaled tiles are ready for products
    used: Any  # products have read the tiles
    sum_full: Any
    sum_empty: Any
    read_full: Any = None  # the gradients of reading keys are ready, and the keys have been read
    read_empty: Any = None


@gluon.jit
def values_of(call, work, sizes):
    """Tiles of v, u, dO and x."""
    return (
        ragged(call.v, call.tokens, work.heads, sizes.V, sizes.V),
        dense(call.u, call.tokens, work.heads, sizes.V, sizes.V),
        ragged(call.do, call.tokens, work.heads, sizes.V, sizes.V),
        dense(call.x, call.tokens, work.heads, sizes.V, sizes.V),
    )


@gluon.jit
def vectors_of(call, work, sizes, key_heads, WIDTH: gl.constexpr):
    """Tiles of q, k, read and write, in blocks of channels."""
    return (
        ragged(call.q, call.tokens, key_heads, sizes.K, WIDTH),
        ragged(call.k, call.tokens, key_heads, sizes.K, WIDTH),
        ragged(call.read, call.tokens, work.heads // sizes.SPLIT, sizes.K, WIDTH),
        ragged(call.write, call.tokens, work.heads // sizes.SPLIT, sizes.K, WIDTH),
    )


@gluon.jit
def gradients_of(call, work, sizes, WIDTH: gl.constexpr):
    """Tiles of the gradients of q, k, read and write, in blocks of channels."""
    return (
        dense(call.dq, call.tokens, work.heads, sizes.K, WIDTH),
        dense(call.dk, call.tokens, work.heads, sizes.K, WIDTH),
        dense(call.dread, call.tokens, work.heads, sizes.K, WIDTH),
        dense(call.dwrite, call.tokens, work.heads, sizes.K, WIDTH),
    )


@gluon.jit
def sources_of(call, work, sizes, WIDTH: gl.constexpr):
    """TMA descriptors of q, k, values, cotangents, states and gradients, in blocks of channels. The delta rule's values are its writes."""
    key_heads = work.heads // call.group
    q = ragged(call.q, call.tokens, key_heads, sizes.K, WIDTH)
    k = ragged(call.k, call.tokens, key_heads, sizes.K, WIDTH)
    if call.u is None:
        v = ragged(call.v, call.tokens, work.heads, sizes.V, sizes.V)
    else:
        v = dense(call.u, call.tokens, work.heads, sizes.V, sizes.V)
    do = ragged(call.do, call.tokens, work.heads, sizes.V, sizes.V)
    x = do
    if call.x is not None:
        x = dense(call.x, call.tokens, work.heads, sizes.V, sizes.V)
    states = of_states(call.states, work.places, sizes.K, sizes.V, sizes.SPLIT, WIDTH)
    dstates = of_states(call.dstates, work.places, sizes.K, sizes.V, sizes.SPLIT, WIDTH)
    dq = dense(call.dq, call.tokens, work.heads, sizes.K, WIDTH)
    return Sources(Loaded(q, k, v, do, x, states, dstates), dq, dense(call.dk, call.tokens, work.heads, sizes.K, WIDTH))
