"""``prepare.prepare`` with a decay per channel for Hopper, in Gluon: sums of decays by tensor cores, in the layout of operands.

Decays are at most 0, so their sums from a block's middle are largest at its ends: the sums of half blocks determine which blocks settle
(see tiles.py). A chunk that settles takes one round of products. In others, tokens are paired in smaller and smaller blocks, down to
the first size of which all settle; a block with a reset inside never does. In blocks that do not settle queries are in
the late half and keys in the early one: one tile has both, scaled by one factor.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from linattn.ops.triton.hopper.common import buffer, numbers
from linattn.ops.triton.hopper.names import copy_wait, fence_async_shared, reinterpret, warpgroup_mma, warpgroup_mma_wait
from linattn.ops.triton.hopper.operands import BLOCK, WIDE, C, add_two, exp2, in_blocks, left
from linattn.ops.triton.hopper.prepare_channel import (
    between,
    chunk,
    copy_pair,
    load_decays,
    numbered,
    room,
    smallest_far,
    summed,
    write_out,
)  # fmt: skip
from linattn.ops.triton.tiles import FARTHEST, LOG2E


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
    of_early, of_late = gl.reduce((early, late), 0, add_two)
    to_middle = of_early * LOG2E
    to_end = of_late * LOG2E
    nearest = gl.min(gl.minimum(to_middle, to_end), 0)
    channels = gl.arange(0, K, to_middle.type.layout)
    gl.store(call.fade + tokens.place * K + channels, exp2(to_middle + to_end))
    BLOCKS: gl.constexpr = K // BLOCK
    factors = numbers(3, K, gl.float32)
    factors.index(0).store(to_middle)
    factors.index(1).store(exp2(to_middle) * call.scale)
    factors.index(2).store(exp2(to_end))
    by_block = reinterpret(factors, gl.float32, [3 * BLOCKS, BLOCK], gl.SwizzledSharedLayout(1, 1, 1, [0]))
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
    if nearest >= -FARTHEST:
        for block in range(BLOCKS):
            middle = by_block.index(block).load(of_channels)[None, :]
            x = summed(t < i if BEFORE else t <= i, decays, block) * LOG2E - middle
            qx = q_blocks.index(block).load(WIDE).to(gl.float32) * exp2(x)
            q_blocks.index(block).store((qx * by_block.index(BLOCKS + block).load(of_channels)[None, :]).to(gl.bfloat16))
            if BEFORE:
                x = summed(t <= i, decays, block) * LOG2E - middle
            kx = k_blocks.index(block).load(WIDE).to(gl.float32) * exp2(-x)
            met.store(kx.to(gl.bfloat16))
            fence_async_shared()
            a_qk = warpgroup_mma(left(qx), met.permute((1, 0)), a_qk, is_async=True)
            k_blocks.index(block).store((kx * by_block.index(2 * BLOCKS + block).load(of_channels)[None, :]).to(gl.bfloat16))
            a_qk = warpgroup_mma_wait(0, deps=[a_qk])
        if BEFORE:
            a_qk = gl.where(i > t, a_qk, 0.0)
        else:
            a_qk = gl.where(i >= t, a_qk, 0.0)
    else:
        least = gl.minimum(smallest_far(early), smallest_far(late))
        m = C // 2
        settled = least // 2
        while m > settled:
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
        middle = (i | gl.maximum(2 * m - 1, 0)) - m
        sign = gl.where((i & m) != 0, LOG2E, -LOG2E)
        d = nothing
        for block in range(BLOCKS):
            x = summed(between(i - 1 if BEFORE else i, middle, t), decays, block) * sign
            qx = left(q_blocks.index(block).load(WIDE).to(gl.float32) * exp2(x))
            if BEFORE:
                x = summed(between(i, middle, t), decays, block) * sign
            kx = k_blocks.index(block).load(WIDE).to(gl.float32) * exp2(-x)
            met.store(kx.to(gl.bfloat16))
            fence_async_shared()
            d = warpgroup_mma(qx, met.permute((1, 0)), d)
        a_qk += gl.where((i >= t if not BEFORE else i > t) & ((i ^ t) < gl.maximum(2 * m, 1)), d, 0.0)
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
