"""``gradients`` with a decay per channel and the delta rule for Hopper, in Gluon: blocks of channels that do not settle.

As levels_plain.py, but values are the written ones, E, and keys read too, with the cotangent -dE. At each size of blocks Z has
queries in late halves and keys in early ones, R keys in both, all scaled by one factor e. With G = dO Eᵀ and N = -dE Eᵀ below
the diagonal and their mirror images above,

    P = (G ∘ apart) Z,    dQ += e ∘ P in late halves,    dK += e ∘ P in early ones,    and to the decay's gradient ± Z ∘ P
    Q = (N ∘ apart) R,    dK += e ∘ Q in both,                                         and to the decay's gradient ± R ∘ Q

Results alias values, cotangents and states in shared memory, which are read before pairs of tokens are computed, so that two programs
share a multiprocessor.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from linattn.ops.triton.hopper import tma
from linattn.ops.triton.hopper.call import Loaded, sources_of
from linattn.ops.triton.hopper.chunks import fetch, send, state_at
from linattn.ops.triton.hopper.common import away_from_zero, buffer, numbers
from linattn.ops.triton.hopper.decays import columns, halves_at, lay_out_orders, save_gradients
from linattn.ops.triton.hopper.levels import (
    Tiles,
    choose,
    cut,
    each_unsettled,
    first_size,
    in_range,
    last_size,
    roles,
    unsettled,
    up_to_middle,
)
from linattn.ops.triton.hopper.levels_plain import programs
from linattn.ops.triton.hopper.names import barrier, fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait
from linattn.ops.triton.hopper.operands import (
    BLOCK,
    WIDE,
    C,
    exp2,
    held,
    hold,
    in_blocks,
    left,
    passing,
    pick,
    rounded,
    split,
    start_products,
    start_sum,
)
from linattn.ops.triton.tiles import LOG2E

__all__ = ["gradients", "options", "programs"]


@gluon.jit
def mirrored(cotangents, values, token, other, scale):
    """Products of cotangents and values of other tokens: a row's cotangent with earlier values, its value with later cotangents."""
    nothing = gl.zeros([C, C], gl.float32, WIDE)
    below = warpgroup_mma(cotangents, values.permute((1, 0)), nothing, use_acc=False, is_async=True)
    above = warpgroup_mma(values, cotangents.permute((1, 0)), nothing, use_acc=False, is_async=True)
    below = warpgroup_mma_wait(1, deps=[below])
    above = warpgroup_mma_wait(0, deps=[above])
    return gl.where(token > other, below, above) * scale


@gluon.jit
def by_levels(at, phase, full, call, work, sources, tiles, sizes):
    """Compute all gradients of a block of channels of a chunk."""
    of_channels: gl.constexpr = gl.SliceLayout(0, WIDE)
    room = tiles.loaded
    qb, kb, eb, ob, xb, sb, dsb = room.q, room.k, room.v, room.do, room.x, room.states, room.dstates
    high, low = tiles.high, tiles.low
    here, block = at.chunk, at.block
    zero = work.heads % call.group  # 0, unknown to the compiler: see prepare_channel.py
    token = gl.arange(0, C, gl.SliceLayout(1, WIDE))[:, None] + zero
    other = gl.arange(0, C, of_channels)[None, :]
    nothing = gl.zeros([C, C], gl.float32, WIDE)
    corner = [here.head // call.group, here.first + here.rows, C - here.rows, block * BLOCK]

    tma.store_wait(0)
    barrier()  # all reads are done
    mbarrier.expect(full, 6 * C * sizes.V + 4 * BLOCK * sizes.V + 4 * C * BLOCK)
    of_state = state_at(at.place, block * BLOCK, sizes.K, sizes.V, sizes.SPLIT)
    tma.load(sources.loaded.states, of_state, full, sb)
    tma.load(sources.loaded.dstates, of_state, full, dsb)
    fetch(sources.loaded.do, here, full, ob, sizes.V)
    fetch(sources.loaded.x, here, full, xb, sizes.V)
    fetch(sources.loaded.v, here, full, eb, sizes.V)
    tma.load(sources.loaded.q, corner, full, qb.reshape((1, 1, C, BLOCK)))
    tma.load(sources.loaded.k, corner, full, kb.reshape((1, 1, C, BLOCK)))

    early, late = halves_at(call.decays, at.place, block, work, sizes, columns(gl.num_warps(), 4))
    ORDERS: gl.constexpr = 1.0 if sizes.LOW else LOG2E  # decays split in two bfloat16 numbers are log2
    early, late = lay_out_orders(early, late, high, low, sizes.LOW)
    tiles.faded.store(exp2(gl.sum(early + late, 0) * ORDERS))
    fence_async_shared()
    barrier()

    # From the states at the ends of the chunk.
    x = start_sum(pick(other <= token), high, low, 0, sizes.LOW)
    y = start_sum(pick(other > token), high, low, 0, sizes.LOW)
    mbarrier.wait(full, phase)
    if sizes.DDECAY:
        tiles.past.store(gl.sum(passing(in_blocks(sb, BLOCK, sizes.V), in_blocks(dsb, BLOCK, sizes.V), sizes.V), 1))
    y = warpgroup_mma_wait(0, deps=[y])
    x = warpgroup_mma_wait(0, deps=[x])
    dq = warpgroup_mma(ob, sb.permute((1, 0)), nothing, use_acc=False, is_async=True)
    dr = warpgroup_mma(xb, sb.permute((1, 0)), nothing, use_acc=False, is_async=True)
    dk = warpgroup_mma(eb, dsb.permute((1, 0)), nothing, use_acc=False, is_async=True)
    x = exp2(x * ORDERS)
    y = exp2(y * ORDERS)
    dq = warpgroup_mma_wait(2, deps=[dq])
    dq = dq * (x * call.scale)
    cross = held(qb) * dq
    dr = warpgroup_mma_wait(1, deps=[dr])
    dr = dr * -x
    cross += held(kb) * dr
    dk = warpgroup_mma_wait(0, deps=[dk])
    dk = dk * y
    sent_high, sent_low = in_blocks(sb, BLOCK, sizes.V).index(0), in_blocks(dsb, BLOCK, sizes.V).index(0)
    barrier()  # states have been read
    if sizes.DDECAY:
        split(held(kb) * dk, sent_high, sent_low)
    dk += dr

    # Products of values and cotangents of pairs of tokens, without decays.
    gs = tiles.g if sizes.V == BLOCK else in_blocks(sb, BLOCK, sizes.V).index(1)
    ns, met, met_keys = in_blocks(ob, C, sizes.V).index(0), in_blocks(eb, C, sizes.V).index(0), in_blocks(xb, C, sizes.V).index(0)
    g = mirrored(ob, eb, token, other, call.scale)
    own = gl.sum(gl.where(token == other, g, 0.0), 1)[:, None]
    hold(gs, g)
    g = mirrored(xb, eb, token, other, -1.0)
    of_strength = gl.sum(gl.where(token == other, g, 0.0), 1)
    barrier()  # values and cotangents have been read
    hold(ns, g)

    # From pairs of different tokens.
    m = first_size(zero, sizes)
    while m >= last_size(sizes):
        token = gl.arange(0, C, gl.SliceLayout(1, WIDE))[:, None] + zero * m  # recomputed: dependent values do not fit into registers
        upper, met_upper, first, count = roles(token, m, sizes)
        orders = start_sum(up_to_middle(token, m, other, sizes, False), high, low, 0, sizes.LOW)
        span = in_range(first, count, other)
        met_by = left(cut(gs.load(WIDE), span))
        orders = warpgroup_mma_wait(0, deps=[orders])
        e = exp2(orders * ORDERS)
        weight = e
        if sizes.SETTLED > 0:
            e = exp2(orders * gl.where(m == C // 4, -ORDERS, ORDERS))
            weight = exp2(orders * gl.where(m == C // 8, -ORDERS, ORDERS))
        barrier()  # all warps' products of the last size are done
        z = choose(gl.where(met_upper, -1, 0).to(gl.int16), qb.load(WIDE), kb.load(WIDE)).to(gl.float32)
        hold(met, z * e)
        hold(met_keys, held(kb) * e)
        fence_async_shared()
        barrier()
        late_half = gl.where(upper, 1.0, 0.0)
        early_half = 1.0 - late_half
        p = warpgroup_mma(met_by, met, nothing, use_acc=False, is_async=True)
        met_by = left(cut(ns.load(WIDE), span))
        p = warpgroup_mma_wait(0, deps=[p])
        if sizes.DDECAY:
            hat = held(met)
            if sizes.SETTLED > 0:
                hat = choose(gl.where(upper, -1, 0).to(gl.int16), qb.load(WIDE), kb.load(WIDE)).to(gl.float32)
                hat = rounded(hat * weight).to(gl.float32)
            cross += hat * p * (late_half - early_half)
        p = p * weight
        dq += p * late_half
        dk += p * early_half
        p = warpgroup_mma(met_by, met_keys, nothing, use_acc=False, is_async=True)
        p = warpgroup_mma_wait(0, deps=[p])
        if sizes.DDECAY:
            hat = held(met_keys)
            if sizes.SETTLED > 0:
                hat = rounded(held(kb) * weight).to(gl.float32)
            cross += hat * p * (late_half - early_half)
        dk += p * weight
        m = m // 2

    # From each token itself.
    dq += own * held(kb)
    dk += own * held(qb)
    barrier()  # decays, queries and keys have been read
    hold(qb, dq)
    hold(kb, dk)
    if sizes.DDECAY:
        split(cross, high.index(0), low.index(0))
    fence_async_shared()
    barrier()
    send(sources.dq, here, block, qb)
    send(sources.dk, here, block, kb)
    if sizes.DDECAY:
        earlier, here_on = pick(other < token), pick(other >= token)
        dd = start_products(((earlier, sent_low), (here_on, low.index(0)), (earlier, sent_high), (here_on, high.index(0))))
        through = (tiles.past.load(of_channels) * tiles.faded.load(of_channels))[None, :]
        dd = warpgroup_mma_wait(0, deps=[dd])
        dd = dd + through
        save_gradients(call.ddecay, dd, here, token, block, work, sizes.K)
    if block == 0:
        save_strengths(-of_strength, call.strengths, here)


@gluon.jit
def save_strengths(d, strengths, here):
    """Store the gradients of the strengths, the products ``d`` of each token's cotangent and value over the squared strengths."""
    row = gl.arange(0, C, gl.SliceLayout(1, WIDE))
    time = here.first.to(gl.int64) + row
    of_head = strengths.base + time * strengths.token + here.head // strengths.split * strengths.head
    b = away_from_zero(gl.load(of_head, mask=row < here.rows, other=1.0).to(gl.float32))
    d = d / (b * b)
    gl.store(strengths.to + time * strengths.heads + here.head, d.to(strengths.to.dtype.element_ty), mask=row < here.rows)


@gluon.jit
def gradients(call, work, sizes):
    """Compute the gradients of blocks that do not settle; with the first block of channels of a chunk those of its strengths."""
    blocks = work.places * (sizes.K // BLOCK)
    item = unsettled(gl.program_id(0), call.settled, blocks, work, sizes)
    if item < blocks:
        sources = sources_of(call, work, sizes, BLOCK)
        V: gl.constexpr = sizes.V
        room = Loaded(
            buffer(1, C, BLOCK).index(0), buffer(1, C, BLOCK).index(0), buffer(1, C, V).index(0), buffer(1, C, V).index(0),
            buffer(1, C, V).index(0), buffer(1, BLOCK, V).index(0), buffer(1, BLOCK, V).index(0),
        )  # fmt: skip
        high, low, more = buffer(1, C, BLOCK), buffer(1, C, BLOCK), buffer(1, C, BLOCK).index(0) if V == BLOCK else None
        tiles = Tiles(room, high, low, None, more, numbers(1, BLOCK, gl.float32).index(0), numbers(1, BLOCK, gl.float32).index(0))
        each_unsettled(by_levels, item, call, work, sources, tiles, sizes)


def options() -> dict[str, int]:
    """Two programs share a multiprocessor: 113 KB and 255 registers each."""
    return dict(num_warps=4)
