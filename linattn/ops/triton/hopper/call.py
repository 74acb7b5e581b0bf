"""The arguments of the kernels of gradients in groups, as the functions on the device take them.

Tuples keep what the compiler knows of their fields (constants, None) as long as they are handed on, not assigned. The order of the fields
is that in which warps are handed them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from linattn.ops.triton.hopper.chunks import Rows


class Sizes(NamedTuple):
    """Constants."""

    C: Any
    K: Any
    V: Any
    SPLIT: Any  # heads that one is taken as, each with V values
    BEFORE: Any  # queries read the state before the token's decay
    PACKED: Any
    DDECAY: Any  # whether the decay's gradient is wanted
    LOW: Any  # whether decays take two numbers of bfloat16
    STAGES: Any
    BYTES: Any = False  # whether numbers are cut out byte by byte


class Decays(NamedTuple):
    """As :class:`Rows`, with the number of heads that share them."""

    base: Any
    token: Any
    head: Any
    split: Any


class Strengths(NamedTuple):
    """Those of the delta rule, where their gradients go, and the number of heads that share them."""

    base: Any
    token: Any
    head: Any
    to: Any
    heads: Any
    split: Any


class Call(NamedTuple):
    """What a kernel reads and writes. With the delta rule, ``x`` are cotangents of what is written, ``u``; else of what is read."""

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
    u: Any  # what a rule writes
    x: Any
    states: Any
    dstates: Any
    dq: Any
    dk: Any
    dread: Any
    dwrite: Any
    ddecay: Any
    dbonus: Any
    settled: Any  # for which blocks of channels of a chunk its gradients are done
    tokens: Any  # of all sequences


class Sources(NamedTuple):
    """What TMA reads and writes."""

    q: Any
    k: Any
    v: Any
    do: Any
    x: Any
    states: Any
    dstates: Any
    dq: Any
    dk: Any


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
    scaled: Any  # made ready for products
    used: Any  # by products
    sum_full: Any
    sum_empty: Any
    read_full: Any = None  # what keys have as they read; keys that are read are used then
    read_empty: Any = None
