"""``prepare.prepare`` for the delta rule with a decay per channel for Hopper, in Gluon.

How tokens meet, see prepare_channel.py. One tile A [C, C] holds both of the products that are wanted: those of queries with keys on
and below the diagonal, and, transposed, those of keys with keys above it. Where tokens meet half to half, one product gives both: its
left operand has queries in the late half of a block and keys in the early one, its right operand has keys throughout. In a chunk that
settles, sums from its first token on scale everything: what queries read with is then what leaves the chunk as ``q_faded``, and what
keys read with is what the inverse multiplies. For the inverse see prepare.py.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from linattn.ops.triton.hopper import prepare as by_head
from linattn.ops.triton.hopper import prepare_channel as plain
from linattn.ops.triton.hopper.common import buffer, locate, numbers
from linattn.ops.triton.hopper.names import (
    copy_async,
    copy_commit,
    copy_wait,
    fence_async_shared,
    reinterpret,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from linattn.ops.triton.plan import CHANNEL, DELTA, Family
from linattn.ops.triton.tiles import LOG2E, TAME

away_from_zero, beside, blocks, halves, invert, product, shelve, solve = (
    by_head.away_from_zero, by_head.beside, by_head.blocks, by_head.halves, by_head.invert, by_head.product, by_head.shelve, by_head.solve,
)  # fmt: skip
add_two, between, decays_of, exp2, in_blocks, keep, left, smallest_far, summed, write_out = (
    plain.add_two, plain.between, plain.decays_of, plain.exp2, plain.in_blocks, plain.keep, plain.left, plain.smallest_far, plain.summed,
    plain.write_out,
)  # fmt: skip
BLOCK, WIDE = plain.BLOCK, plain.WIDE
S = by_head.S
THIN = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 16, 16]))  # [C, S] in accumulators


@gluon.jit
def wide(tile):
    return tile.load(WIDE).to(gl.float32)


@gluon.jit
def reciprocal(x):
    """1 / x in one instruction, from numbers that are already there: no register holds what they are powers of."""
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], gl.float32, True, 1)


@gluon.jit
def strictly_late(n, row, C: gl.constexpr):
    """T' [column, row] of T = (I - N)^-1 in four pieces, from N' [column, row], which is 0 on and below its diagonal."""
    tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, C], gl.bfloat16)
    high, low = halves(n)
    high = gl.allocate_shared_memory(gl.bfloat16, [C, C], tile, high)
    low = gl.allocate_shared_memory(gl.bfloat16, [C, C], tile, low)
    n0, n1, n2, n3 = blocks(n, THIN)
    warp = row[:, None] // S
    own = gl.where(warp < 2, gl.where(warp < 1, n0, n1), gl.where(warp < 3, n2, n3))
    diagonal = gl.allocate_shared_memory(gl.float32, [S, 4, S], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
    diagonal.store(own.reshape([4, S, S]).permute((1, 0, 2)))
    inverses = shelve(invert(diagonal).permute((1, 0, 2)).reshape([C, S]))
    fence_async_shared()
    r = gl.zeros([C, C], gl.float32, WIDE)
    x0 = solve(0, r, inverses, row, THIN)
    r = product(x0, high.slice(0, S), low.slice(0, S), r, THIN, False)
    x1 = solve(1, r, inverses, row, THIN)
    r = product(x1, high.slice(S, S), low.slice(S, S), r, THIN, True)
    x2 = solve(2, r, inverses, row, THIN)
    r = product(x2, high.slice(2 * S, S), low.slice(2 * S, S), r, THIN, True)
    return x0, x1, x2, solve(3, r, inverses, row, THIN)


@gluon.jit(do_not_specialize=[
    "q_token", "q_head", "k_token", "k_head", "read_token", "read_head", "write_token", "write_head", "decay_token", "decay_head",
    "beta_token", "beta_head", "sequences", "tokens", "heads", "group",
])  # fmt: skip
def prepare(
    q, k, v, read, write, decay, beta, bonus, cu,
    p, p_write, b, t_inverse, w, q_faded, k_faded, write_faded, fade,
    q_token, q_head, k_token, k_head, read_token, read_head, write_token, write_head, decay_token, decay_head, beta_token, beta_head,
    sequences, tokens, heads, group, scale,
    K: gl.constexpr, C: gl.constexpr, BK: gl.constexpr, DECAY: gl.constexpr, RULE: gl.constexpr, BEFORE: gl.constexpr,
    PACKED: gl.constexpr, BITS: gl.constexpr, PRECISION: gl.constexpr,
    kind: gl.constexpr,
):  # fmt: skip
    index = gl.program_id(1) * gl.num_programs(0) + gl.program_id(0)
    slot = index // heads  # heads side by side: their rows are
    head = index % heads
    _, first, last, _, _, _ = locate(slot, cu, sequences, tokens, C, PACKED)
    if first < last:
        count = last - first
        time = first.to(gl.int64)
        place = slot.to(gl.int64) * heads + head
        own_head = head.to(gl.int64)
        shared = own_head // group

        tiles: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, K], gl.bfloat16)
        copying: gl.constexpr = gl.BlockedLayout([1, 8], [256 // K, K // 8], [4, 1], [1, 0])
        row = gl.arange(0, C, gl.SliceLayout(1, copying))
        channel = gl.arange(0, K, gl.SliceLayout(0, copying))
        inside = (row < count)[:, None]
        q_tile = gl.allocate_shared_memory(gl.bfloat16, [C, K], tiles)
        k_tile = gl.allocate_shared_memory(gl.bfloat16, [C, K], tiles)
        from_q = q + time * (q_token // 8 * 8) + shared * (q_head // 8 * 8)
        from_k = k + time * (k_token // 8 * 8) + shared * (k_head // 8 * 8)
        copy_async(q_tile, from_q + row[:, None] * (q_token // 8 * 8) + channel[None, :], mask=inside)
        copy_async(k_tile, from_k + row[:, None] * (k_token // 8 * 8) + channel[None, :], mask=inside)
        copy_commit()

        HALF: gl.constexpr = C // 2
        stride = decay_token // 4 * 4
        from_decay = decay + time * stride + own_head * (decay_head // 4 * 4)
        token = gl.arange(0, C, gl.BlockedLayout([1], [32], [4], [0]))
        strength = gl.load(beta + (time + token) * beta_token + own_head * beta_head, mask=token < count, other=0.0)
        early = decays_of(from_decay, stride, 0, count, HALF, K)
        late = decays_of(from_decay, stride, HALF, count, HALF, K)
        high_tile = gl.allocate_shared_memory(gl.bfloat16, [C, K], tiles)
        low_tile = gl.allocate_shared_memory(gl.bfloat16, [C, K], tiles)
        if decay.dtype.element_ty == gl.bfloat16:
            kept = (high_tile, None)
            decays = (in_blocks(high_tile, C, K), None)
        else:
            kept = (high_tile, low_tile)
            decays = (in_blocks(high_tile, C, K), in_blocks(low_tile, C, K))
        keep(early, kept, 0, HALF)
        keep(late, kept, HALF, HALF)
        fence_async_shared()
        of_early, of_late = gl.reduce((early, late), 0, add_two)
        nearest = gl.min(gl.minimum(of_early, of_late), 0) * LOG2E
        total = exp2((of_early + of_late) * LOG2E)
        channels = gl.arange(0, K, total.type.layout)
        gl.store(fade + place * K + channels, total)
        BLOCKS: gl.constexpr = K // BLOCK
        totals = numbers(1, K, gl.float32)
        totals.index(0).store(total)
        by_block = reinterpret(totals, gl.float32, [BLOCKS, BLOCK], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        strengths = numbers(1, C, gl.float32).index(0)
        strengths.store(away_from_zero(strength.to(gl.float32)))
        q_blocks = in_blocks(q_tile, C, K)
        k_blocks = in_blocks(k_tile, C, K)
        seen = in_blocks(high_tile, C, K)  # keys as they read the state: in the place of decays, once these are summed
        kept_keys = in_blocks(low_tile, C, K)  # and as what they write is read, in a chunk that settles
        met = buffer(1, C, BLOCK).index(0)  # what goes through shared memory to be an operand

        nought = heads % group  # but no compiler knows: ptxas sets constants among left operands after the first product that reads them
        i = (gl.arange(0, C, gl.SliceLayout(1, WIDE)) + nought)[:, None]
        t = gl.arange(0, C, gl.SliceLayout(0, WIDE))[None, :]
        of_channels: gl.constexpr = gl.SliceLayout(0, WIDE)
        nothing = gl.zeros([C, C], gl.float32, WIDE)
        d = nothing
        e = nothing
        copy_wait(0)
        if nearest >= -TAME:
            for block in range(BLOCKS):
                x = summed(t <= i, decays, block) * LOG2E
                here = exp2(x)
                kx = wide(k_blocks.index(block))
                seen.index(block).store((kx * here).to(gl.bfloat16))
                kx = kx * reciprocal(here)
                kept_keys.index(block).store(kx.to(gl.bfloat16))
                k_blocks.index(block).store((kx * by_block.index(block).load(of_channels)[None, :]).to(gl.bfloat16))
                q_blocks.index(block).store((wide(q_blocks.index(block)) * scale * here).to(gl.bfloat16))
            fence_async_shared()
            for block in gl.static_range(BLOCKS):
                d = warpgroup_mma(q_blocks.index(block), kept_keys.index(block).permute((1, 0)), d, use_acc=block > 0, is_async=True)
                e = warpgroup_mma(kept_keys.index(block), seen.index(block).permute((1, 0)), e, use_acc=block > 0, is_async=True)
            d, e = warpgroup_mma_wait(0, deps=[d, e])
            a = gl.where(i >= t, d, e)
        else:
            m = gl.minimum(smallest_far(early), smallest_far(late)) // 2
            settled = m
            middle = (i | gl.maximum(2 * m - 1, 0)) - m
            sign = gl.where((i & m) != 0, LOG2E, -LOG2E)
            for block in range(BLOCKS):
                x = summed(between(i, middle, t), decays, block) * sign
                here = exp2(x)
                qx = left(wide(q_blocks.index(block)) * here)
                kx = wide(k_blocks.index(block))
                k_read = (kx * here).to(gl.bfloat16)
                kx = (kx * reciprocal(here)).to(gl.bfloat16)
                met.store(kx)
                fence_async_shared()
                d = warpgroup_mma(qx, met.permute((1, 0)), d)
                met.store(k_read)
                fence_async_shared()
                e = warpgroup_mma(left(kx), met.permute((1, 0)), e)
            a = gl.where((i ^ t) < gl.maximum(2 * m, 1), gl.where(i >= t, d, e), 0.0)
            m = C // 2
            while m > settled:
                upper = (i & m) != 0
                chosen = between(i, (i | (2 * m - 1)) - m, t)
                d = nothing
                for block in range(BLOCKS):
                    here = exp2(summed(chosen, decays, block) * LOG2E)
                    qx = (wide(q_blocks.index(block)) * here).to(gl.bfloat16)
                    kx = (wide(k_blocks.index(block)) * here).to(gl.bfloat16)
                    met.store(kx)
                    fence_async_shared()
                    d = warpgroup_mma(left(gl.where(upper, qx, kx)), met.permute((1, 0)), d)
                a += gl.where(((i ^ t) & -m) == m, d, 0.0)
                m = m // 2
            a = gl.where(i >= t, a * scale, a)
            for block in range(BLOCKS):
                kx = k_blocks.index(block).load(WIDE)
                x = summed(t > i, decays, block) * LOG2E
                k_blocks.index(block).store((kx.to(gl.float32) * exp2(x)).to(gl.bfloat16))
                here = exp2(summed(t <= i, decays, block) * LOG2E)
                q_blocks.index(block).store((wide(q_blocks.index(block)) * scale * here).to(gl.bfloat16))
                seen.index(block).store((kx.to(gl.float32) * here).to(gl.bfloat16))
        write_out(q_faded + place * C * K, q_tile, C, K)
        write_out(k_faded + place * C * K, k_tile, C, K)
        met.store(gl.where(i >= t, a, 0.0).to(gl.bfloat16))
        write_out(p + place * C * C, met, C, C)

        column = gl.arange(0, C, gl.SliceLayout(1, THIN))
        n = gl.where(i < t, a * -strengths.load(of_channels)[None, :], 0.0)
        x0, x1, x2, x3 = strictly_late(n, column + nought, C)
        strength = strengths.load(gl.SliceLayout(1, THIN))[:, None]
        done = (x0 * strength).to(kind), (x1 * strength).to(kind), (x2 * strength).to(kind), (x3 * strength).to(kind)
        met.permute((1, 0)).store(beside(done))
        fence_async_shared()
        write_out(b + place * C * C, met, C, C)
        for block in range(BLOCKS):
            x = warpgroup_mma(met, seen.index(block), nothing, use_acc=False)
            seen.index(block).store((-x).to(gl.bfloat16))
        write_out(w + place * C * K, high_tile, C, K)


def fits(family: Family, decay: Tensor) -> bool:
    """Whether this kernel can stand for ``prepare.prepare`` where queries and keys suit TMA. Strides may be 0: decays that last."""
    even = decay.data_ptr() % 16 == 0 and decay.stride(1) % 4 == decay.stride(2) % 4 == 0 and decay.stride(3) == 1
    ours = family.rule == DELTA and family.decay == CHANNEL and not family.before
    return ours and decay.dtype in (torch.bfloat16, torch.float32) and even


def options() -> dict[str, int]:
    """Registers for three programs a multiprocessor."""
    return dict(BK=BLOCK.value, num_warps=4, maxnreg=168)
