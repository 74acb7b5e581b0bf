"""``prepare.prepare`` with a decay per channel for Hopper, in Gluon: sums of decays by tensor cores, in the layout of operands.

A chunk that settles (see decays.py) takes one round of products. In others, tokens are paired in smaller and smaller blocks, down to
the first size of which all settle. In blocks that do not settle queries are in
the late half and keys in the early one: one tile has both, scaled by one factor.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from linattn.ops.triton.hopper.common import buffer
from linattn.ops.triton.hopper.decays import SPAN
from linattn.ops.triton.hopper.names import copy_wait, fence_async_shared, warpgroup_mma, warpgroup_mma_wait
from linattn.ops.triton.hopper.operands import BLOCK, WIDE, C, exp2, in_blocks, left
from linattn.ops.triton.hopper.prepare_channel import (
    between,
    chunk,
    copy_pair,
    from_middle,
    largest_settled,
    load_decays,
    numbered,
    room,
    save_totals,
    summed,
    write_out,
)  # fmt: skip
from linattn.ops.triton.tiles import LOG2E


@gluon.jit
def prepare(call, at, K: gl.constexpr, BEFORE: gl.constexpr):
    """Store p, scaled queries and keys, and the decay of the chunk."""
    tokens = chunk(call, at)
    q_tile, k_tile = room(K), room(K)
    copy_pair(q_tile, k_tile, call, tokens, K)

    high_tile = room(K)
    low_tile, low = None, None
    if call.decay.base.dtype.element_ty != gl.bfloat16:
        low_tile = room(K)
        low = in_blocks(low_tile, C, K)
    early, late = load_decays(call, tokens, (high_tile, low_tile), K)
    decays = (in_blocks(high_tile, C, K), low)
    by_block, of_chunk, of_half = save_totals(early, late, call, tokens, K, not BEFORE)
    BLOCKS: gl.constexpr = K // BLOCK
    q_blocks = in_blocks(q_tile, C, K)
    k_blocks = in_blocks(k_tile, C, K)
    met = buffer(1, C, BLOCK).index(0)  # right operands, in shared memory

    i, t = numbered(call)
    of_channels: gl.constexpr = gl.SliceLayout(0, WIDE)
    nothing = gl.zeros([C, C], gl.float32, WIDE)
    a_qk = nothing
    copy_wait(0)
    own = gl.zeros([C], gl.float32, gl.SliceLayout(1, WIDE))
    if BEFORE:
        for block in range(BLOCKS):
            u = gl.load(call.bonus + at.head * K + block * BLOCK + gl.arange(0, BLOCK, of_channels))[None, :].to(gl.float32)
            own += gl.sum(q_blocks.index(block).load(WIDE) * k_blocks.index(block).load(WIDE) * u, 1)
    if of_chunk >= -SPAN:
        for block in range(BLOCKS):
            middle = by_block.index(block).load(of_channels)[None, :] * 0.5
            fading = exp2(middle)
            x = summed(t < i if BEFORE else t <= i, decays, block) * LOG2E - middle
            qx = q_blocks.index(block).load(WIDE).to(gl.float32) * exp2(x)
            q_blocks.index(block).store((qx * (fading * call.scale)).to(gl.bfloat16))
            if BEFORE:
                x = summed(t <= i, decays, block) * LOG2E - middle
            kx = k_blocks.index(block).load(WIDE).to(gl.float32) * exp2(-x)
            met.store(kx.to(gl.bfloat16))
            fence_async_shared()
            a_qk = warpgroup_mma(left(qx), met.permute((1, 0)), a_qk, is_async=True)
            k_blocks.index(block).store((kx * fading).to(gl.bfloat16))
            a_qk = warpgroup_mma_wait(0, deps=[a_qk])
        if BEFORE:
            a_qk = gl.where(i > t, a_qk, 0.0)
        else:
            a_qk = gl.where(i >= t, a_qk, 0.0)
    else:
        n = largest_settled(early, late, of_half)
        m = C // 2
        while m >= n:
            upper = (i & m) != 0
            middle = (i | (2 * m - 1)) - m
            chosen = between(gl.where(upper, i - 1, i) if BEFORE else i, middle, t)
            d = nothing
            for block in range(BLOCKS):
                x = summed(chosen, decays, block) * LOG2E
                qk = gl.where(upper, q_blocks.index(block).load(WIDE), k_blocks.index(block).load(WIDE))
                qk = (qk.to(gl.float32) * exp2(x)).to(gl.bfloat16)
                met.store(qk)
                fence_async_shared()
                d = warpgroup_mma(left(qk), met.permute((1, 0)), d)
            a_qk += gl.where(upper & (((i ^ t) & -m) == m), d, 0.0)
            m = m // 2
        d = nothing
        for block in range(BLOCKS):
            x = from_middle(i, t, n, decays, block, BEFORE) * LOG2E
            qx = left(q_blocks.index(block).load(WIDE).to(gl.float32) * exp2(x))
            if BEFORE:
                x = from_middle(i, t, n, decays, block, False) * LOG2E
            kx = k_blocks.index(block).load(WIDE).to(gl.float32) * exp2(-x)
            met.store(kx.to(gl.bfloat16))
            fence_async_shared()
            d = warpgroup_mma(qx, met.permute((1, 0)), d)
        a_qk += gl.where((i >= t if not BEFORE else i > t) & ((i ^ t) < n), d, 0.0)
        for block in range(BLOCKS):
            x = summed(t < i if BEFORE else t <= i, decays, block) * LOG2E
            qx = q_blocks.index(block).load(WIDE).to(gl.float32) * call.scale * exp2(x)
            q_blocks.index(block).store(qx.to(gl.bfloat16))
            x = summed(t > i, decays, block) * LOG2E
            kx = k_blocks.index(block).load(WIDE).to(gl.float32) * exp2(x)
            k_blocks.index(block).store(kx.to(gl.bfloat16))
    if BEFORE:
        a_qk = gl.where(i == t, own[:, None], a_qk)
    met.store((a_qk * call.scale).to(gl.bfloat16))
    write_out(call.p + tokens.place * C * C, met, C)
    if call.q_faded is not None:
        write_out(call.q_faded + tokens.place * C * K, q_tile, K)
    write_out(call.k_faded + tokens.place * C * K, k_tile, K)


def options() -> dict[str, int]:
    """Registers for three programs a multiprocessor."""
    return dict(num_warps=4, maxnreg=168)
