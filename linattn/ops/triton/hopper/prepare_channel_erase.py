"""``prepare.prepare`` for the erase rule with a decay per channel for Hopper, in Gluon.

As in prepare_channel_delta.py, two tiles hold the four products that are wanted: with each of what writes (k, w), those of queries on
and below the diagonal, and, transposed, those of what reads (r, before a token's decay) above it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from linattn.ops.triton.hopper import prepare as by_head
from linattn.ops.triton.hopper import prepare_channel as plain
from linattn.ops.triton.hopper import prepare_channel_delta as delta
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
from linattn.ops.triton.plan import CHANNEL, ERASE, Family
from linattn.ops.triton.tiles import LOG2E, TAME

beside, halves = by_head.beside, by_head.halves
add_two, between, decays_of, exp2, in_blocks, keep, left, smallest_far, summed, write_out = (
    plain.add_two, plain.between, plain.decays_of, plain.exp2, plain.in_blocks, plain.keep, plain.left, plain.smallest_far, plain.summed,
    plain.write_out,
)  # fmt: skip
reciprocal, strictly_late, wide = delta.reciprocal, delta.strictly_late, delta.wide
BLOCK, WIDE, THIN = plain.BLOCK, plain.WIDE, delta.THIN


@gluon.jit
def copy(tile, source, token, head, first, which, inside, row, channel):
    """Begin to bring rows of a head to shared memory; zeros follow them."""
    token = token // 8 * 8
    source += first * token + which * (head // 8 * 8)
    copy_async(tile, source + row[:, None] * token + channel[None, :], mask=inside)


@gluon.jit
def half(block, x):
    block.store(x.to(gl.bfloat16))


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
        r_tile = gl.allocate_shared_memory(gl.bfloat16, [C, K], tiles)
        w_tile = gl.allocate_shared_memory(gl.bfloat16, [C, K], tiles)
        copy(q_tile, q, q_token, q_head, time, shared, inside, row, channel)
        copy(k_tile, k, k_token, k_head, time, shared, inside, row, channel)
        copy(r_tile, read, read_token, read_head, time, own_head, inside, row, channel)
        copy(w_tile, write, write_token, write_head, time, own_head, inside, row, channel)
        copy_commit()

        HALF: gl.constexpr = C // 2
        stride = decay_token // 4 * 4
        from_decay = decay + time * stride + own_head * (decay_head // 4 * 4)
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
        q_blocks = in_blocks(q_tile, C, K)
        k_blocks = in_blocks(k_tile, C, K)
        r_blocks = in_blocks(r_tile, C, K)
        w_blocks = in_blocks(w_tile, C, K)
        kept_k = in_blocks(low_tile, C, K)  # what writes as it is read, in a chunk that settles: in the place of decays
        kept_w = in_blocks(high_tile, C, K)
        met = buffer(1, C, BLOCK).index(0)  # what goes through shared memory to be an operand

        nought = heads % group  # but no compiler knows: ptxas sets constants among left operands after the first product that reads them
        i = (gl.arange(0, C, gl.SliceLayout(1, WIDE)) + nought)[:, None]
        t = gl.arange(0, C, gl.SliceLayout(0, WIDE))[None, :]
        of_channels: gl.constexpr = gl.SliceLayout(0, WIDE)
        nothing = gl.zeros([C, C], gl.float32, WIDE)
        qk = nothing
        qw = nothing
        kr = nothing
        wr = nothing
        copy_wait(0)
        if nearest >= -TAME:
            for block in range(BLOCKS):
                before = exp2(summed(t < i, decays, block) * LOG2E)
                half(r_blocks.index(block), wide(r_blocks.index(block)) * before)
                here = exp2(summed(t <= i, decays, block) * LOG2E)
                half(q_blocks.index(block), wide(q_blocks.index(block)) * scale * here)
                back = reciprocal(here)
                fading = by_block.index(block).load(of_channels)[None, :]
                x = wide(k_blocks.index(block)) * back
                half(kept_k.index(block), x)
                half(k_blocks.index(block), x * fading)
                x = wide(w_blocks.index(block)) * back
                half(kept_w.index(block), x)
                half(w_blocks.index(block), x * fading)
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
            m = gl.minimum(smallest_far(early), smallest_far(late)) // 2
            settled = m
            middle = (i | gl.maximum(2 * m - 1, 0)) - m
            sign = gl.where((i & m) != 0, LOG2E, -LOG2E)
            for block in range(BLOCKS):
                r_met = (wide(r_blocks.index(block)) * exp2(summed(between(i - 1, middle, t), decays, block) * sign)).to(gl.bfloat16)
                here = exp2(summed(between(i, middle, t), decays, block) * sign)
                q_met = (wide(q_blocks.index(block)) * here).to(gl.bfloat16)
                back = reciprocal(here)
                k_met = (wide(k_blocks.index(block)) * back).to(gl.bfloat16)
                w_met = (wide(w_blocks.index(block)) * back).to(gl.bfloat16)
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
            near = (i ^ t) < gl.maximum(2 * m, 1)
            of_k = gl.where(near, gl.where(i >= t, qk, kr), 0.0)
            of_w = gl.where(near, gl.where(i >= t, qw, wr), 0.0)
            m = C // 2
            while m > settled:
                upper = (i & m) != 0
                middle = (i | (2 * m - 1)) - m
                qk = nothing
                qw = nothing
                for block in range(BLOCKS):
                    before = exp2(summed(between(gl.where(upper, i - 1, i), middle, t), decays, block) * LOG2E)
                    r_met = (wide(r_blocks.index(block)) * before).to(gl.bfloat16)
                    here = exp2(summed(between(i, middle, t), decays, block) * LOG2E)
                    q_met = (wide(q_blocks.index(block)) * here).to(gl.bfloat16)
                    k_met = (wide(k_blocks.index(block)) * here).to(gl.bfloat16)
                    w_met = (wide(w_blocks.index(block)) * here).to(gl.bfloat16)
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
            of_k = gl.where(i >= t, of_k * scale, of_k)
            of_w = gl.where(i >= t, of_w * scale, of_w)
            for block in range(BLOCKS):
                x = exp2(summed(t > i, decays, block) * LOG2E)
                half(k_blocks.index(block), wide(k_blocks.index(block)) * x)
                half(w_blocks.index(block), wide(w_blocks.index(block)) * x)
                here = exp2(summed(t <= i, decays, block) * LOG2E)
                half(q_blocks.index(block), wide(q_blocks.index(block)) * scale * here)
                before = exp2(summed(t < i, decays, block) * LOG2E)
                half(r_blocks.index(block), wide(r_blocks.index(block)) * before)
        write_out(q_faded + place * C * K, q_tile, C, K)
        write_out(k_faded + place * C * K, k_tile, C, K)
        write_out(write_faded + place * C * K, w_tile, C, K)
        met.store(gl.where(i >= t, of_k, 0.0).to(gl.bfloat16))
        write_out(p + place * C * C, met, C, C)
        met.store(gl.where(i >= t, of_w, 0.0).to(gl.bfloat16))
        write_out(p_write + place * C * C, met, C, C)

        square: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, C], gl.bfloat16)
        high, low = halves(gl.where(i < t, of_k, 0.0))
        a_high = gl.allocate_shared_memory(gl.bfloat16, [C, C], square, high)
        a_low = gl.allocate_shared_memory(gl.bfloat16, [C, C], square, low)
        x = strictly_late(gl.where(i < t, of_w, 0.0), gl.arange(0, C, gl.SliceLayout(1, THIN)) + nought, C)
        x = beside(x)
        t_high = x.to(gl.bfloat16)
        t_low = gl.allocate_shared_memory(gl.bfloat16, [C, C], square)
        met.permute((1, 0)).store(t_high)
        t_low.permute((1, 0)).store((x - t_high.to(gl.float32)).to(gl.bfloat16))
        fence_async_shared()
        write_out(t_inverse + place * C * C, met, C, C)
        x = warpgroup_mma(t_low, a_high.permute((1, 0)), nothing, use_acc=False, is_async=True)
        x = warpgroup_mma(met, a_low.permute((1, 0)), x, is_async=True)
        x = warpgroup_mma(met, a_high.permute((1, 0)), x, is_async=True)
        x = warpgroup_mma_wait(0, deps=[x])
        t_low.store(x.to(gl.bfloat16))
        write_out(b + place * C * C, t_low, C, C)
        for block in range(BLOCKS):
            x = warpgroup_mma(met, r_blocks.index(block), nothing, use_acc=False)
            half(r_blocks.index(block), x)
        write_out(w + place * C * K, r_tile, C, K)


def fits(family: Family, decay: Tensor, read: Tensor | None, write: Tensor | None) -> bool:
    """Whether this kernel can stand for ``prepare.prepare`` where queries and keys suit TMA. Strides may be 0: decays that last."""
    if read is None or write is None or family.rule != ERASE or family.decay != CHANNEL or family.before:
        return False
    even = decay.data_ptr() % 16 == 0 and decay.stride(1) % 4 == decay.stride(2) % 4 == 0 and decay.stride(3) == 1
    return even and decay.dtype in (torch.bfloat16, torch.float32) and _moves(read) and _moves(write)


def _moves(t: Tensor) -> bool:
    """Whether 16 bytes of a row can be copied at a time."""
    even = t.data_ptr() % 16 == 0 and t.stride(1) % 8 == t.stride(2) % 8 == 0 and t.stride(3) == 1
    return even and t.dtype == torch.bfloat16


def options() -> dict[str, int]:
    """Registers for two programs a multiprocessor."""
    return dict(BK=BLOCK.value, num_warps=4, maxnreg=255)
