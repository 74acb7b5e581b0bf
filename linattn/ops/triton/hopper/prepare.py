"""``prepare.prepare`` for Hopper, in Gluon: one kernel whose body depends on the family. One program per chunk and head."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from linattn.ops.triton.hopper import prepare_delta, prepare_erase, prepare_head, prepare_plain
from linattn.ops.triton.hopper.chunks import Rows
from linattn.ops.triton.hopper.common import locate
from linattn.ops.triton.tiles import CHANNEL, DELTA, PLAIN


class Call(NamedTuple):
    """Tensors that the kernel reads and writes."""

    q: Rows
    k: Rows
    read: Rows
    write: Rows
    decay: Rows
    beta: Rows
    bonus: Any
    p: Any
    p_write: Any
    b: Any
    t_inverse: Any
    w: Any
    q_faded: Any
    k_faded: Any
    write_faded: Any
    fade: Any
    settled: Any
    heads: Any
    group: Any
    scale: Any


class Slot(NamedTuple):
    """The chunk of a program: its number among all, its head, and its tokens."""

    slot: Any
    head: Any
    first: Any
    last: Any


@gluon.jit(do_not_specialize=[
    "q_token", "q_head", "k_token", "k_head", "read_token", "read_head", "write_token", "write_head", "decay_token", "decay_head",
    "beta_token", "beta_head", "sequences", "tokens", "heads", "group",
])  # fmt: skip
def prepare(
    q, k, v, read, write, decay, beta, bonus, cu,
    p, p_write, b, t_inverse, w, q_faded, k_faded, write_faded, fade, settled,
    q_token, q_head, k_token, k_head, read_token, read_head, write_token, write_head, decay_token, decay_head, beta_token, beta_head,
    sequences, tokens, heads, group, scale,
    K: gl.constexpr, C: gl.constexpr, DECAY: gl.constexpr, RULE: gl.constexpr, BEFORE: gl.constexpr,
    PACKED: gl.constexpr, BITS: gl.constexpr, PRECISION: gl.constexpr, kind: gl.constexpr,
):  # fmt: skip
    """Programs are renumbered, heads first, so that concurrent ones read whole rows of memory."""
    index = gl.program_id(1) * gl.num_programs(0) + gl.program_id(0)
    slot = index // heads
    head = index % heads
    _, first, last, _, _, _ = locate(slot, cu, sequences, tokens, C, PACKED)
    if first < last:
        call = Call(
            Rows(q, q_token, q_head), Rows(k, k_token, k_head), Rows(read, read_token, read_head), Rows(write, write_token, write_head),
            Rows(decay, decay_token, decay_head), Rows(beta, beta_token, beta_head), bonus,
            p, p_write, b, t_inverse, w, q_faded, k_faded, write_faded, fade, settled, heads, group, scale,
        )  # fmt: skip
        at = Slot(slot, head, first, last)
        if DECAY != CHANNEL:
            prepare_head.prepare(call, at, index, K, C, DECAY, BITS, kind)
        elif RULE == PLAIN:
            prepare_plain.prepare(call, at, K, BEFORE)
        elif RULE == DELTA:
            prepare_delta.prepare(call, at, K, kind)
        else:
            prepare_erase.prepare(call, at, K)
