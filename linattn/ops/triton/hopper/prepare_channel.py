"""``prepare.prepare`` with a decay per channel for Hopper, in Gluon: sums of decays by tensor cores, in the layout that multiplies.

One program a chunk and head; three of them share a multiprocessor and hide each other's loads. Sums of decays are products of a 0/1
matrix with the decays (bfloat16, and what that leaves of float32), and come out of the tensor cores where the queries and keys they
scale are held, which go back in as left operands from the same registers.

As decays are at most 0, no token of a block is further from its middle than the ends are, so the sums of half blocks say which blocks
settle (see tiles.py). A chunk that settles as a whole takes one round of products. In any other, tokens meet in smaller and smaller
blocks, down to the first size of which all settle; with a reset inside none does, whatever the other decays are. Before blocks settle
a query stands in their late half and a key in the early one: one tile holds both, scaled by one factor.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

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
from linattn.ops.triton.plan import CHANNEL, PLAIN, Family
from linattn.ops.triton.tiles import LOG2E, TAME

BLOCK = gl.constexpr(64)  # channels of a step: a row of the swizzle of shared memory
WIDE = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))  # [C, C] and [C, BLOCK] in accumulators
NATURAL_RESET = gl.constexpr(-111.0)  # 160 binary orders, which no weight survives, as a natural logarithm that bfloat16 can hold


@gluon.jit
def exp2(x):
    """2^x in one instruction; what has no normal float32 is 0."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], gl.float32, True, 1)


@gluon.jit
def add_two(a, b, c, d):
    return a + c, b + d


@gluon.jit
def left(x):
    """A tile as the left operand of a product, from the registers it is in.

    Those must be written before the wgmma.fence of the product, which LLVM does not know: it pairs numbers up right before their use.
    An instruction with effects, as far as it knows, stays where it is.
    """
    x = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x.to(gl.bfloat16)], gl.bfloat16, False, 2)
    return gl.convert_layout(x, gl.DotOperandLayout(0, WIDE, 2), assert_trivial=True)


@gluon.jit
def summed(chosen, decays, block):
    """Sums [C, BLOCK] of the decays of ``block`` over the tokens that each row of ``chosen`` [C, C] picks."""
    high, low = decays
    pick = left(gl.where(chosen, 1.0, 0.0))
    x = gl.zeros([chosen.shape[0], BLOCK], gl.float32, WIDE)
    if low is not None:
        x = warpgroup_mma(pick, low.index(block), x, use_acc=False, is_async=True)
        x = warpgroup_mma(pick, high.index(block), x, is_async=True)
    else:
        x = warpgroup_mma(pick, high.index(block), x, use_acc=False, is_async=True)
    return warpgroup_mma_wait(0, deps=[x])


@gluon.jit
def between(i, middle, t):
    """[C, C]: whether token t counts between token i and the middle of its block: past the earlier, up to the later."""
    return (t > gl.minimum(i, middle)) & (t <= gl.maximum(i, middle))


@gluon.jit
def smallest_far(a):
    """The least m, a power of two up to 32, for which m tokens in a row (from a multiple of m on) sum to more than TAME."""
    K: gl.constexpr = a.shape[1]
    least = gl.full(a.shape, 32, gl.int32, a.type.layout)
    for n in gl.static_range(5):
        least = gl.where(a < -TAME / LOG2E, gl.minimum(least, 2**n), least)
        a = gl.sum(gl.reshape(a, [16 >> n, 2, K]), 1)
        least = gl.min(gl.reshape(least, [16 >> n, 2, K]), 1)
    return gl.min(gl.min(least, 0), 0)


@gluon.jit
def decays_of(decay, stride, first, last, ROWS: gl.constexpr, K: gl.constexpr):
    """Natural logarithms [ROWS, K] from row ``first`` on, 0 from row ``last`` on; a reset is finite and leaves nothing."""
    layout: gl.constexpr = gl.BlockedLayout([ROWS * K // 512, 4], [128 // K, K // 4], [4, 1], [1, 0])
    row = first + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    channel = gl.arange(0, K, gl.SliceLayout(0, layout))
    a = gl.load(decay + row[:, None] * stride + channel[None, :], mask=(row < last)[:, None], other=0.0)
    return gl.maximum(a.to(gl.float32), NATURAL_RESET)


@gluon.jit
def keep(a, decays, first, ROWS: gl.constexpr):
    """Leave ``a`` [ROWS, K] in shared memory for products."""
    high, low = decays
    if low is not None:
        cut = (a.to(gl.int32, bitcast=True) & -65536).to(gl.float32, bitcast=True)
        low.slice(first, ROWS).store((a - cut).to(gl.bfloat16))
        a = cut
    high.slice(first, ROWS).store(a.to(gl.bfloat16))


@gluon.jit
def in_blocks(tile, C: gl.constexpr, K: gl.constexpr):
    """A tile [C, K] as [K / BLOCK, C, BLOCK]: how the swizzle lays it out."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, BLOCK], gl.bfloat16)
    return reinterpret(tile, gl.bfloat16, [K // BLOCK, C, BLOCK], layout)


@gluon.jit
def write_out(to, tile, C: gl.constexpr, WIDTH: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    row = gl.arange(0, C, gl.SliceLayout(1, layout))
    column = gl.arange(0, WIDTH, gl.SliceLayout(0, layout))
    gl.store(to + row[:, None] * WIDTH + column[None, :], tile.load(layout))


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
        early = decays_of(from_decay, stride, 0, count, HALF, K)
        late = decays_of(from_decay, stride, HALF, count, HALF, K)
        high_tile = gl.allocate_shared_memory(gl.bfloat16, [C, K], tiles)
        low_tile, low = None, None
        if decay.dtype.element_ty != gl.bfloat16:
            low_tile = gl.allocate_shared_memory(gl.bfloat16, [C, K], tiles)
            low = in_blocks(low_tile, C, K)
        keep(early, (high_tile, low_tile), 0, HALF)
        keep(late, (high_tile, low_tile), HALF, HALF)
        fence_async_shared()
        decays = (in_blocks(high_tile, C, K), low)
        of_early, of_late = gl.reduce((early, late), 0, add_two)
        to_middle = of_early * LOG2E
        to_end = of_late * LOG2E
        nearest = gl.min(gl.minimum(to_middle, to_end), 0)
        channels = gl.arange(0, K, to_middle.type.layout)
        gl.store(fade + place * K + channels, exp2(to_middle + to_end))
        BLOCKS: gl.constexpr = K // BLOCK
        factors = numbers(3, K, gl.float32)
        factors.index(0).store(to_middle)
        factors.index(1).store(exp2(to_middle) * scale)
        factors.index(2).store(exp2(to_end))
        by_block = reinterpret(factors, gl.float32, [3 * BLOCKS, BLOCK], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        q_blocks = in_blocks(q_tile, C, K)
        k_blocks = in_blocks(k_tile, C, K)
        met = buffer(1, C, BLOCK).index(0)  # what goes through shared memory to be a right operand

        nought = heads % group  # but no compiler knows: ptxas sets constants among left operands after the first product that reads them
        i = (gl.arange(0, C, gl.SliceLayout(1, WIDE)) + nought)[:, None]
        t = gl.arange(0, C, gl.SliceLayout(0, WIDE))[None, :]
        of_channels: gl.constexpr = gl.SliceLayout(0, WIDE)
        nothing = gl.zeros([C, C], gl.float32, WIDE)
        a_qk = nothing
        copy_wait(0)
        own = gl.zeros([C], gl.float32, gl.SliceLayout(1, WIDE))
        if BEFORE:
            for block in range(BLOCKS):
                u = gl.load(bonus + head * K + block * BLOCK + gl.arange(0, BLOCK, of_channels))[None, :].to(gl.float32)
                own += gl.sum(q_blocks.index(block).load(WIDE) * k_blocks.index(block).load(WIDE) * u, 1)
        if nearest >= -TAME:
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
                qx = q_blocks.index(block).load(WIDE).to(gl.float32) * scale * exp2(x)
                q_blocks.index(block).store(qx.to(gl.bfloat16))
                x = summed(t > i, decays, block) * LOG2E
                kx = k_blocks.index(block).load(WIDE).to(gl.float32) * exp2(x)
                k_blocks.index(block).store(kx.to(gl.bfloat16))
        if BEFORE:
            a_qk = gl.where(i == t, own[:, None], a_qk)
        met.store((a_qk * scale).to(gl.bfloat16))
        write_out(p + place * C * C, met, C, C)
        write_out(q_faded + place * C * K, q_tile, C, K)
        write_out(k_faded + place * C * K, k_tile, C, K)


def fits(family: Family, decay: Tensor) -> bool:
    """Whether this kernel can stand for ``prepare.prepare`` where queries and keys suit TMA. Strides may be 0: decays that last."""
    even = decay.data_ptr() % 16 == 0 and decay.stride(1) % 4 == decay.stride(2) % 4 == 0 and decay.stride(3) == 1
    return family.rule == PLAIN and family.decay == CHANNEL and decay.dtype in (torch.bfloat16, torch.float32) and even


def options() -> dict[str, int]:
    """Registers for three programs a multiprocessor."""
    return dict(BK=BLOCK.value, num_warps=4, maxnreg=168)
