"""``gradients`` for Hopper, in Gluon: one kernel whose body depends on the family.

Without a decay per channel whole chunks are computed at once (whole.py). With one, ``settled`` says of how many tokens the blocks of a
chunk settle (see decays.py), by block of channels. A first launch (settled_*.py) computes all chunks of the programs that have one that
settles as a whole, with exact gradients where they do. Two more (levels_*.py) compute those of which the halves settle, and the others,
level by level.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from linattn.ops.triton.hopper import (
    levels_delta,
    levels_erase,
    levels_plain,
    settled_delta,
    settled_erase,
    settled_plain,
    whole,
    whole_delta,
)
from linattn.ops.triton.hopper.call import Call, Decays, Sizes, Strengths
from linattn.ops.triton.hopper.chunks import Rows, Work
from linattn.ops.triton.tiles import CHANNEL, DELTA, PLAIN


@gluon.jit(do_not_specialize=[
    "q_token", "q_head", "k_token", "k_head", "v_token", "v_head", "read_token", "read_head", "write_token", "write_head",
    "decay_token", "decay_head", "beta_token", "beta_head", "do_token", "do_head", "sequences", "tokens", "heads", "group", "chunks_before",
])  # fmt: skip
def gradients(
    q, k, v, read, write, decay, beta, bonus, do, cu,
    values, de, states, dstates,
    dq, dk, dread, dwrite, ddecay, dbeta, dbonus, settled,
    q_token, q_head, k_token, k_head, v_token, v_head, read_token, read_head, write_token, write_head, decay_token, decay_head,
    beta_token, beta_head, do_token, do_head,
    sequences, tokens, heads, group, scale, chunks_before,
    K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, DECAY: gl.constexpr, RULE: gl.constexpr,
    BEFORE: gl.constexpr, PACKED: gl.constexpr, BITS: gl.constexpr, PRECISION: gl.constexpr, kind: gl.constexpr,
    SPLIT: gl.constexpr, DDECAY: gl.constexpr, SETTLED: gl.constexpr = 0,
    STAGES: gl.constexpr = 1, PAIRS: gl.constexpr = 1, REGISTERS: gl.constexpr = 0, SUMS: gl.constexpr = 0, FEW: gl.constexpr = 0,
    HALVES: gl.constexpr = False,
):  # fmt: skip
    """``SETTLED``: tokens of the blocks that settle in what is computed: 64, 32 or 0. The last constants are a body's ``options``."""
    if PACKED:
        chunks = tokens // C + sequences
        length = tokens
    else:
        chunks = (tokens + C - 1) // C * sequences
        length = tokens * sequences
    work = Work(chunks * heads, cu, sequences, tokens, heads)
    call = Call(
        Rows(q, q_token, q_head), Rows(k, k_token, k_head), Rows(v, v_token, v_head), Rows(read, read_token, read_head),
        Rows(write, write_token, write_head), Rows(do, do_token, do_head), group, scale, Decays(decay, decay_token, decay_head, SPLIT),
        Strengths(beta, beta_token, beta_head, dbeta, heads, SPLIT), bonus, values, de, states, dstates,
        dq, dk, dread, dwrite, ddecay, dbonus, settled, length,
    )  # fmt: skip
    if DECAY != CHANNEL and HALVES:
        whole_delta.gradients(call, work, Sizes(K, V, SPLIT, BEFORE, PACKED, DDECAY, False, STAGES), DECAY, BITS, REGISTERS, FEW)
    elif DECAY != CHANNEL:
        whole.gradients(call, work, Sizes(K, V, SPLIT, BEFORE, PACKED, DDECAY, False, STAGES), DECAY, RULE, BITS, PAIRS, REGISTERS, FEW)
    else:
        LOW: gl.constexpr = decay.dtype.element_ty != gl.bfloat16
        if SETTLED == C:
            if RULE == PLAIN:
                settled_plain.gradients(call, work, Sizes(K, V, SPLIT, BEFORE, PACKED, DDECAY, LOW, STAGES, SETTLED), REGISTERS, SUMS, FEW)
            elif RULE == DELTA:
                settled_delta.gradients(call, work, Sizes(K, V, SPLIT, BEFORE, PACKED, DDECAY, LOW, STAGES, SETTLED), REGISTERS, SUMS, FEW)
            else:
                settled_erase.gradients(call, work, Sizes(K, V, SPLIT, BEFORE, PACKED, DDECAY, LOW, STAGES, SETTLED))
        elif RULE == PLAIN:
            levels_plain.gradients(call, work, Sizes(K, V, SPLIT, BEFORE, PACKED, DDECAY, LOW, STAGES, SETTLED))
        elif RULE == DELTA:
            levels_delta.gradients(call, work, Sizes(K, V, SPLIT, BEFORE, PACKED, DDECAY, LOW, STAGES, SETTLED))
        else:
            levels_erase.gradients(call, work, Sizes(K, V, SPLIT, BEFORE, PACKED, DDECAY, LOW, STAGES, SETTLED))
