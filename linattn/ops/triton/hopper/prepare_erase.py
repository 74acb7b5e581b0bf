"""``prepare.prepare`` for the erase rule with a decay per channel for Hopper, in Gluon.

As in prepare_delta.py, but two tiles have four products: for each kind of key (k, w) those with queries q on and below the diagonal
and, transposed, those with queries r, which read before a token's decay, above it.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from linattn.ops.triton.hopper.common import buffer
from linattn.ops.triton.hopper.names import copy_commit, copy_wait, fence_async_shared, warpgroup_mma, warpgroup_mma_wait
from linattn.ops.triton.hopper.operands import BLOCK, WIDE, C, exp2, held, hold, in_blocks, left, rounded
from linattn.ops.triton.hopper.prepare_channel import (
    WHOLE,
    between,
    chunk,
    copy_rows,
    each,
    from_middle,
    largest_settled,
    load_decays,
    numbered,
    reciprocal,
    room,
    save_totals,
    summed,
    write_out,
)  # fmt: skip
from linattn.ops.triton.hopper.prepare_delta import THIN, strictly_late
from linattn.ops.triton.hopper.prepare_head import beside, halves
from linattn.ops.triton.tiles import LOG2E


@gluon.jit
def copy(tile, x, here, head, K: gl.constexpr):
    """Start to copy rows of a head of ``x``."""
    copy_rows(tile, x.base + (here.time * (x.token // 8 * 8) + head * (x.head // 8 * 8)), x.token, here.count, K)


@gluon.jit
def prepare(call, at, K: gl.constexpr):
    """Store p, b, the inverse, w, scaled queries and keys, and the decay of the chunk."""
    tokens = chunk(call, at)
    q_tile, k_tile, r_tile, w_tile = room(K), room(K), room(K), room(K)
    copy(q_tile, call.q, tokens, tokens.shared, K)
    copy(k_tile, call.k, tokens, tokens.shared, K)
    copy(r_tile, call.read, tokens, tokens.head, K)
    copy(w_tile, call.write, tokens, tokens.head, K)
    copy_commit()

    LOW: gl.constexpr = call.decay.base.dtype.element_ty != gl.bfloat16
    high_tile, low_tile = room(K), room(K)
    early, late = load_decays(call, tokens, (high_tile, low_tile if LOW else None), K)
    decays = (in_blocks(high_tile, C, K), in_blocks(low_tile, C, K) if LOW else None)
    by_block, of_chunk, of_half = save_totals(early, late, call, tokens, K, True)
    BLOCKS: gl.constexpr = K // BLOCK
    q_blocks = in_blocks(q_tile, C, K)
    k_blocks = in_blocks(k_tile, C, K)
    r_blocks = in_blocks(r_tile, C, K)
    w_blocks = in_blocks(w_tile, C, K)
    kept_k = in_blocks(low_tile, C, K)  # keys scaled as written, in a chunk that settles, aliasing decays
    kept_w = in_blocks(high_tile, C, K)
    met = buffer(1, C, BLOCK).index(0)  # operands that pass through shared memory

    i, t = numbered(call)
    of_channels: gl.constexpr = gl.SliceLayout(0, WIDE)
    nothing = gl.zeros([C, C], gl.float32, WIDE)
    qk = nothing
    qw = nothing
    kr = nothing
    wr = nothing
    copy_wait(0)
    if of_chunk >= -WHOLE:
        for block in range(BLOCKS):
            before = exp2(summed(t < i, decays, block) * LOG2E)
            hold(r_blocks.index(block), held(r_blocks.index(block)) * before)
            here = exp2(summed(t <= i, decays, block) * LOG2E)
            hold(q_blocks.index(block), held(q_blocks.index(block)) * call.scale * here)
            back = reciprocal(here)
            fading = exp2(by_block.index(block).load(of_channels))[None, :]
            x = held(k_blocks.index(block)) * back
            hold(kept_k.index(block), x)
            hold(k_blocks.index(block), x * fading)
            x = held(w_blocks.index(block)) * back
            hold(kept_w.index(block), x)
            hold(w_blocks.index(block), x * fading)
        fence_async_shared()
        for block in gl.static_range(BLOCKS):
            qk = warpgroup_mma(q_blocks.index(block), kept_k.index(block).permute((1, 0)), qk, use_acc=block > 0, is_async=True)
            kr = warpgroup_mma(kept_k.index(block), r_blocks.index(block).permute((1, 0)), kr, use_acc=block > 0, is_async=True)
            qw = warpgroup_mma(q_blocks.index(block), kept_w.index(block).permute((1, 0)), qw, use_acc=block > 0, is_async=True)
            wr = warpgroup_mma(kept_w.index(block), r_blocks.index(block).permute((1, 0)), wr, use_acc=block > 0, is_async=True)
        qk, kr, qw, wr = warpgroup_mma_wait(0, deps=[qk, kr, qw, wr])
        of_k = gl.where(i >= t, qk, kr)
        of_w = gl.where(i >= t, qw, wr)
    else:
        n = largest_settled(early, late, of_half)
        for block in range(BLOCKS):
            x = from_middle(i, t, n, decays, block, False) * LOG2E
            r_met = (held(r_blocks.index(block)) * exp2(x - each(decays, block) * LOG2E)).to(gl.bfloat16)
            here = exp2(x)
            q_met = (held(q_blocks.index(block)) * here).to(gl.bfloat16)
            back = reciprocal(here)
            k_met = (held(k_blocks.index(block)) * back).to(gl.bfloat16)
            w_met = (held(w_blocks.index(block)) * back).to(gl.bfloat16)
            met.store(k_met)
            fence_async_shared()
            qk = warpgroup_mma(left(q_met), met.permute((1, 0)), qk)
            met.store(w_met)
            fence_async_shared()
            qw = warpgroup_mma(left(q_met), met.permute((1, 0)), qw)
            met.store(r_met)
            fence_async_shared()
            kr = warpgroup_mma(left(k_met), met.permute((1, 0)), kr)
            wr = warpgroup_mma(left(w_met), met.permute((1, 0)), wr)
        near = (i ^ t) < n
        of_k = gl.where(near, gl.where(i >= t, qk, kr), 0.0)
        of_w = gl.where(near, gl.where(i >= t, qw, wr), 0.0)
        m = C // 2
        while m >= n:
            upper = (i & m) != 0
            middle = (i | (2 * m - 1)) - m
            qk = nothing
            qw = nothing
            for block in range(BLOCKS):
                x = summed(between(i, middle, t), decays, block) * LOG2E
                r_met = (held(r_blocks.index(block)) * exp2(x - each(decays, block) * LOG2E)).to(gl.bfloat16)
                here = exp2(x)
                q_met = (held(q_blocks.index(block)) * here).to(gl.bfloat16)
                k_met = (held(k_blocks.index(block)) * here).to(gl.bfloat16)
                w_met = (held(w_blocks.index(block)) * here).to(gl.bfloat16)
                met.store(gl.where(upper, r_met, k_met))
                fence_async_shared()
                qk = warpgroup_mma(left(gl.where(upper, q_met, k_met)), met.permute((1, 0)), qk)
                met.store(gl.where(upper, r_met, w_met))
                fence_async_shared()
                qw = warpgroup_mma(left(gl.where(upper, q_met, w_met)), met.permute((1, 0)), qw)
            apart = ((i ^ t) & -m) == m
            of_k += gl.where(apart, qk, 0.0)
            of_w += gl.where(apart, qw, 0.0)
            m = m // 2
        of_k = gl.where(i >= t, of_k * call.scale, of_k)
        of_w = gl.where(i >= t, of_w * call.scale, of_w)
        for block in range(BLOCKS):
            x = exp2(summed(t > i, decays, block) * LOG2E)
            hold(k_blocks.index(block), held(k_blocks.index(block)) * x)
            hold(w_blocks.index(block), held(w_blocks.index(block)) * x)
            x = summed(t <= i, decays, block) * LOG2E
            hold(r_blocks.index(block), held(r_blocks.index(block)) * exp2(x - each(decays, block) * LOG2E))
            hold(q_blocks.index(block), held(q_blocks.index(block)) * call.scale * exp2(x))
    write_out(call.q_faded + tokens.place * C * K, q_tile, K)
    write_out(call.k_faded + tokens.place * C * K, k_tile, K)
    write_out(call.write_faded + tokens.place * C * K, w_tile, K)
    met.store(gl.where(i >= t, of_k, 0.0).to(gl.bfloat16))
    write_out(call.p + tokens.place * C * C, met, C)
    met.store(gl.where(i >= t, of_w, 0.0).to(gl.bfloat16))
    write_out(call.p_write + tokens.place * C * C, met, C)

    square: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, C], gl.bfloat16)
    high, low = halves(gl.where(i < t, of_k, 0.0))
    a_high = gl.allocate_shared_memory(gl.bfloat16, [C, C], square, high)
    a_low = gl.allocate_shared_memory(gl.bfloat16, [C, C], square, low)
    x = strictly_late(gl.where(i < t, of_w, 0.0), gl.arange(0, C, gl.SliceLayout(1, THIN)) + call.heads % call.group)
    x = beside(x)
    t_high = rounded(x)
    t_low = gl.allocate_shared_memory(gl.bfloat16, [C, C], square)
    met.permute((1, 0)).store(t_high)
    t_low.permute((1, 0)).store((x - t_high.to(gl.float32)).to(gl.bfloat16))
    fence_async_shared()
    write_out(call.t_inverse + tokens.place * C * C, met, C)
    x = warpgroup_mma(t_low, a_high.permute((1, 0)), nothing, use_acc=False, is_async=True)
    x = warpgroup_mma(met, a_low.permute((1, 0)), x, is_async=True)
    x = warpgroup_mma(met, a_high.permute((1, 0)), x, is_async=True)
    x = warpgroup_mma_wait(0, deps=[x])
    t_low.store(x.to(gl.bfloat16))
    write_out(call.b + tokens.place * C * C, t_low, C)
    for block in range(BLOCKS):
        x = warpgroup_mma(met, r_blocks.index(block), nothing, use_acc=False)
        hold(r_blocks.index(block), x)
    write_out(call.w + tokens.place * C * K, r_tile, K)


def options() -> dict[str, int]:
    """Registers for two programs a multiprocessor."""
    return dict(num_warps=4, maxnreg=255)
