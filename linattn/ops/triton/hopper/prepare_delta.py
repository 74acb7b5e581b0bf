"""``prepare.prepare`` for the delta rule with a decay per channel for Hopper, in Gluon.

For blocks of pairs see prepare_plain.py. One tile A [C, C] has both products: queries with keys on and below the diagonal, and,
transposed, keys with keys above it. For pairs of halves one product gives both: its left operand has queries in the late half of a
block and keys in the early one, its right operand has keys only. In a chunk of at most :data:`WHOLE` binary orders everything is scaled
by sums from its first token on: the scaled queries are also ``q_faded``, and the scaled keys are multiplied by the inverse. For the
inverse see prepare_head.py.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from linattn.ops.triton.hopper.common import away_from_zero, buffer, numbers
from linattn.ops.triton.hopper.names import copy_wait, fence_async_shared, warpgroup_mma, warpgroup_mma_wait
from linattn.ops.triton.hopper.operands import BLOCK, WIDE, C, exp2, held, in_blocks, left, rounded
from linattn.ops.triton.hopper.prepare_channel import (
    WHOLE,
    between,
    chunk,
    copy_pair,
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
from linattn.ops.triton.hopper.prepare_head import S, beside, blocks, halves, invert, product, shelve, solve
from linattn.ops.triton.tiles import LOG2E

THIN = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 16, 16]))  # [C, S] in accumulators


@gluon.jit
def strictly_late(n, row):
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


@gluon.jit
def prepare(call, at, K: gl.constexpr, kind: gl.constexpr):
    """Store p, b, w, scaled queries and keys, and the decay of the chunk."""
    tokens = chunk(call, at)
    q_tile, k_tile = room(K), room(K)
    copy_pair(q_tile, k_tile, call, tokens, K)

    LOW: gl.constexpr = call.decay.base.dtype.element_ty != gl.bfloat16
    token = gl.arange(0, C, gl.BlockedLayout([1], [32], [4], [0]))
    inside = token < tokens.count
    where = call.beta.base + (tokens.time + token) * call.beta.token + tokens.head * call.beta.head
    strength = gl.load(where, mask=inside, other=0.0)
    high_tile, low_tile = room(K), room(K)
    early, late = load_decays(call, tokens, (high_tile, low_tile if LOW else None), K)
    decays = (in_blocks(high_tile, C, K), in_blocks(low_tile, C, K) if LOW else None)
    by_block, of_chunk, of_half = save_totals(early, late, call, tokens, K, True)
    BLOCKS: gl.constexpr = K // BLOCK
    strengths = numbers(1, C, gl.float32).index(0)
    strengths.store(away_from_zero(strength.to(gl.float32)))
    q_blocks = in_blocks(q_tile, C, K)
    k_blocks = in_blocks(k_tile, C, K)
    seen = in_blocks(high_tile, C, K)  # keys scaled to read the state, aliasing the summed decays
    kept_keys = in_blocks(low_tile, C, K)  # keys scaled as written, in a chunk that settles
    met = buffer(1, C, BLOCK).index(0)  # operands that pass through shared memory

    i, t = numbered(call)
    of_channels: gl.constexpr = gl.SliceLayout(0, WIDE)
    nothing = gl.zeros([C, C], gl.float32, WIDE)
    d = nothing
    e = nothing
    copy_wait(0)
    if of_chunk >= -WHOLE:
        for block in range(BLOCKS):
            x = summed(t <= i, decays, block) * LOG2E
            here = exp2(x)
            kx = held(k_blocks.index(block))
            seen.index(block).store((kx * here).to(gl.bfloat16))
            kx = kx * reciprocal(here)
            kept_keys.index(block).store(kx.to(gl.bfloat16))
            k_blocks.index(block).store((kx * exp2(by_block.index(block).load(of_channels))[None, :]).to(gl.bfloat16))
            q_blocks.index(block).store((held(q_blocks.index(block)) * call.scale * here).to(gl.bfloat16))
        fence_async_shared()
        for block in gl.static_range(BLOCKS):
            d = warpgroup_mma(q_blocks.index(block), kept_keys.index(block).permute((1, 0)), d, use_acc=block > 0, is_async=True)
            e = warpgroup_mma(kept_keys.index(block), seen.index(block).permute((1, 0)), e, use_acc=block > 0, is_async=True)
        d, e = warpgroup_mma_wait(0, deps=[d, e])
        a = gl.where(i >= t, d, e)
    else:
        n = largest_settled(early, late, of_half)
        for block in range(BLOCKS):
            here = exp2(from_middle(i, t, n, decays, block, False) * LOG2E)
            qx = left(held(q_blocks.index(block)) * here)
            kx = held(k_blocks.index(block))
            k_read = (kx * here).to(gl.bfloat16)
            kx = rounded(kx * reciprocal(here))
            met.store(kx)
            fence_async_shared()
            d = warpgroup_mma(qx, met.permute((1, 0)), d)
            met.store(k_read)
            fence_async_shared()
            e = warpgroup_mma(left(kx), met.permute((1, 0)), e)
        a = gl.where((i ^ t) < n, gl.where(i >= t, d, e), 0.0)
        m = C // 2
        while m >= n:
            upper = (i & m) != 0
            chosen = between(i, (i | (2 * m - 1)) - m, t)
            d = nothing
            for block in range(BLOCKS):
                here = exp2(summed(chosen, decays, block) * LOG2E)
                qx = (held(q_blocks.index(block)) * here).to(gl.bfloat16)
                kx = rounded(held(k_blocks.index(block)) * here)
                met.store(kx)
                fence_async_shared()
                d = warpgroup_mma(left(gl.where(upper, qx, kx)), met.permute((1, 0)), d)
            a += gl.where(((i ^ t) & -m) == m, d, 0.0)
            m = m // 2
        a = gl.where(i >= t, a * call.scale, a)
        for block in range(BLOCKS):
            kx = k_blocks.index(block).load(WIDE)
            x = summed(t > i, decays, block) * LOG2E
            k_blocks.index(block).store((kx.to(gl.float32) * exp2(x)).to(gl.bfloat16))
            here = exp2(summed(t <= i, decays, block) * LOG2E)
            q_blocks.index(block).store((held(q_blocks.index(block)) * call.scale * here).to(gl.bfloat16))
            seen.index(block).store((kx.to(gl.float32) * here).to(gl.bfloat16))
    write_out(call.q_faded + tokens.place * C * K, q_tile, K)
    write_out(call.k_faded + tokens.place * C * K, k_tile, K)
    met.store(gl.where(i >= t, a, 0.0).to(gl.bfloat16))
    write_out(call.p + tokens.place * C * C, met, C)

    column = gl.arange(0, C, gl.SliceLayout(1, THIN))
    n = gl.where(i < t, a * -strengths.load(of_channels)[None, :], 0.0)
    x0, x1, x2, x3 = strictly_late(n, column + call.heads % call.group)
    strength = strengths.load(gl.SliceLayout(1, THIN))[:, None]
    done = (x0 * strength).to(kind), (x1 * strength).to(kind), (x2 * strength).to(kind), (x3 * strength).to(kind)
    met.permute((1, 0)).store(beside(done))
    fence_async_shared()
    write_out(call.b + tokens.place * C * C, met, C)
    for block in range(BLOCKS):
        x = warpgroup_mma(met, seen.index(block), nothing, use_acc=False)
        seen.index(block).store((-x).to(gl.bfloat16))
    write_out(call.w + tokens.place * C * K, high_tile, K)


def options() -> dict[str, int]:
    """Registers for three programs a multiprocessor."""
    return dict(num_warps=4, maxnreg=168)
