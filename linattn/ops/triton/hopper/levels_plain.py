"""``gradients`` with a decay per channel for Hopper, in Gluon: plain rule, blocks that do not settle, left by settled_plain.py.

For blocks of pairs see levels.py. At each size of blocks a token has one factor: with Z the tile of scaled queries and keys, and G = dO Vᵀ
below the diagonal and its mirror image above,

    P = (G ∘ apart) Z,    dQ += e ∘ P in late halves,    dK += e ∘ P in early ones,    and to the decay's gradient ± Z ∘ P

so each size needs one product, and one for the sums of decays. The parts from the state before the chunk and from the cotangent after it
are weighted by the decay from the chunk's start and to its end.

A program processes blocks of 64 channels that are not marked in ``settled``, one after the other; two programs share a multiprocessor
and hide each other's latency.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from linattn.ops.triton.hopper import tma
from linattn.ops.triton.hopper.call import Loaded, sources_of
from linattn.ops.triton.hopper.chunks import fetch, send, state_at
from linattn.ops.triton.hopper.common import buffer, numbers
from linattn.ops.triton.hopper.decays import ROWS, halves_at, lay_out_orders, save_gradients
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
from linattn.ops.triton.hopper.names import barrier, fence_async_shared, mbarrier, reinterpret, warpgroup_mma, warpgroup_mma_wait
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


@gluon.jit
def by_levels(at, phase, full, call, work, sources, tiles, sizes):
    """Compute all gradients of a block of channels of a chunk."""
    of_channels: gl.constexpr = gl.SliceLayout(0, WIDE)
    room = tiles.loaded
    qb, kb, vb, ob, sb, dsb = room.q, room.k, room.v, room.do, room.states, room.dstates
    high, low, met, gs, faded = tiles.high, tiles.low, tiles.met, tiles.g, tiles.faded
    here, block = at.chunk, at.block
    zero = work.heads % call.group  # 0, unknown to the compiler: see prepare_channel.py
    token = gl.arange(0, C, gl.SliceLayout(1, WIDE))[:, None] + zero
    other = gl.arange(0, C, of_channels)[None, :]
    nothing = gl.zeros([C, C], gl.float32, WIDE)
    channel = gl.arange(0, BLOCK, of_channels)
    corner = [here.head // call.group, here.first + here.rows, C - here.rows, block * BLOCK]

    tma.store_wait(0)
    barrier()  # all reads are done
    mbarrier.expect(full, 4 * C * sizes.V + 4 * BLOCK * sizes.V + 4 * C * BLOCK)
    fetch(sources.loaded.v, here, full, vb, sizes.V)
    fetch(sources.loaded.do, here, full, ob, sizes.V)
    tma.load(sources.loaded.q, corner, full, qb.reshape((1, 1, C, BLOCK)))
    tma.load(sources.loaded.k, corner, full, kb.reshape((1, 1, C, BLOCK)))
    of_state = state_at(at.place, block * BLOCK, sizes.K, sizes.V, sizes.SPLIT)
    tma.load(sources.loaded.states, of_state, full, sb)
    tma.load(sources.loaded.dstates, of_state, full, dsb)

    early, late = halves_at(call.decays, at.place, block, work, sizes, ROWS)
    ORDERS: gl.constexpr = 1.0 if sizes.LOW else LOG2E  # decays split in two bfloat16 numbers are log2
    early, late = lay_out_orders(early, late, high, low, sizes.LOW)
    fence_async_shared()
    halfway = reinterpret(gs, gl.float32, [C // 2, BLOCK], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    halfway.store(early + late)
    barrier()
    by_column: gl.constexpr = gl.BlockedLayout([C // 4, 1], [2, 16], [1, 4], [0, 1])
    faded.store(exp2(gl.sum(halfway.load(by_column), 0) * ORDERS))

    # From the states at the ends of the chunk.
    x = start_sum(pick(other < token if sizes.BEFORE else other <= token), high, low, 0, sizes.LOW)
    y = start_sum(pick(other > token), high, low, 0, sizes.LOW)
    y = warpgroup_mma_wait(0, deps=[y])
    x = warpgroup_mma_wait(0, deps=[x])
    mbarrier.wait(full, phase)
    dq = warpgroup_mma(ob, sb.permute((1, 0)), nothing, use_acc=False, is_async=True)
    dk = warpgroup_mma(vb, dsb.permute((1, 0)), nothing, use_acc=False, is_async=True)
    below = warpgroup_mma(ob, vb.permute((1, 0)), nothing, use_acc=False, is_async=True)
    above = warpgroup_mma(vb, ob.permute((1, 0)), nothing, use_acc=False, is_async=True)
    x = exp2(x * ORDERS) * call.scale
    y = exp2(y * ORDERS)
    dq = warpgroup_mma_wait(3, deps=[dq])
    dq = dq * x
    cross = held(qb) * dq
    dk = warpgroup_mma_wait(2, deps=[dk])
    dk = dk * y
    below = warpgroup_mma_wait(1, deps=[below])
    above = warpgroup_mma_wait(0, deps=[above])
    g = gl.where(token > other, below, above) * call.scale
    own = gl.sum(gl.where(token == other, g, 0.0), 1)[:, None]
    if sizes.BEFORE:  # there is no decay between neighbours
        near_below = pick_from(token == other + 1, g)
        near_above = pick_from(token == other - 1, g)
        g = gl.where((token == other + 1) | (token == other - 1), 0.0, g)
    hold(gs, g)
    if sizes.BEFORE:
        near = warpgroup_mma(near_below, kb, nothing, use_acc=False, is_async=True)
        dq += warpgroup_mma_wait(0, deps=[near])
        gl.store(call.dbonus + at.place * sizes.K + block * BLOCK + channel, gl.sum(own * held(qb) * held(kb), 0))
        sent = held(kb) * dk
        near = warpgroup_mma(near_above, qb, nothing, use_acc=False, is_async=True)
        dk += warpgroup_mma_wait(0, deps=[near])
    else:
        sent = held(kb) * dk
    sent_high, sent_low = in_blocks(vb, C, sizes.V).index(0), in_blocks(ob, C, sizes.V).index(0)
    if sizes.DDECAY:
        barrier()  # values and cotangents have been read
        split(sent, sent_high, sent_low)

    # From pairs of different tokens.
    inner = nothing
    m = first_size(zero, sizes)
    while m >= last_size(sizes):
        token = gl.arange(0, C, gl.SliceLayout(1, WIDE))[:, None] + zero * m  # recomputed: dependent values do not fit into registers
        upper, met_upper, first, count = roles(token, m, sizes)
        orders = start_sum(up_to_middle(token, m, other, sizes, sizes.BEFORE), high, low, 0, sizes.LOW)
        met_by = left(cut(gs.load(WIDE), in_range(first, count, other)))
        z = choose(gl.where(met_upper, -1, 0).to(gl.int16), qb.load(WIDE), kb.load(WIDE)).to(gl.float32)
        orders = warpgroup_mma_wait(0, deps=[orders])
        e = exp2(orders * ORDERS)
        weight = e
        if sizes.SETTLED > 0:
            e = exp2(orders * gl.where(m == C // 4, -ORDERS, ORDERS))
            weight = exp2(orders * gl.where(m == C // 8, -ORDERS, ORDERS))
        barrier()  # all warps' products of the last size are done
        hold(met, z * e)
        fence_async_shared()
        barrier()
        p = warpgroup_mma(met_by, met, nothing, use_acc=False, is_async=True)
        p = warpgroup_mma_wait(0, deps=[p])
        late_half = gl.where(upper, 1.0, 0.0)
        early_half = 1.0 - late_half
        if sizes.DDECAY:
            hat = held(met)
            if sizes.SETTLED > 0:
                hat = choose(gl.where(upper, -1, 0).to(gl.int16), qb.load(WIDE), kb.load(WIDE)).to(gl.float32)
                hat = rounded(hat * weight).to(gl.float32)
            c = hat * p
            if sizes.BEFORE:
                cross += c * late_half
                inner -= c * early_half
            else:
                cross += c * (late_half - early_half)
        p = p * weight
        dq += p * late_half
        dk += p * early_half
        m = m // 2

    # From each token itself.
    of_q = held(kb)
    of_k = held(qb)
    if sizes.BEFORE:
        u = gl.load(call.bonus + here.head // sizes.SPLIT * sizes.K + block * BLOCK + channel).to(gl.float32)[None, :]
        of_q = of_q * u
        of_k = of_k * u
    dq += own * of_q
    dk += own * of_k
    barrier()  # decays, queries and keys have been read
    hold(qb, dq)
    hold(kb, dk)
    if sizes.DDECAY:
        split(cross, high.index(0), low.index(0))
        if sizes.BEFORE:
            split(inner, met, gs)
    fence_async_shared()
    barrier()
    send(sources.dq, here, block, qb)
    send(sources.dk, here, block, kb)
    if sizes.DDECAY:
        earlier = pick(other < token)
        later = pick(other > token if sizes.BEFORE else other >= token)
        dd = start_products(((earlier, sent_low), (later, low.index(0)), (earlier, sent_high), (later, high.index(0))))
        if sizes.BEFORE:
            here_on = pick(other >= token)
            dd = warpgroup_mma(here_on, gs, dd, is_async=True)
            dd = warpgroup_mma(here_on, met, dd, is_async=True)
        past = gl.convert_layout(gl.sum(passing(in_blocks(sb, BLOCK, sizes.V), in_blocks(dsb, BLOCK, sizes.V), sizes.V), 1), of_channels)
        past = (past * faded.load(of_channels))[None, :]
        dd = warpgroup_mma_wait(0, deps=[dd])
        dd = dd + past
        save_gradients(call.ddecay, dd, here, token, block, work, sizes.K)


@gluon.jit
def pick_from(chosen, x):
    """Mask ``x`` by ``chosen`` and make it a left operand."""
    return left(gl.where(chosen, x, 0.0))


@gluon.jit
def gradients(call, work, sizes):
    """Compute the gradients of blocks that do not settle."""
    blocks = work.places * (sizes.K // BLOCK)
    item = unsettled(gl.program_id(0), call.settled, blocks, work, sizes)
    if item < blocks:
        sources = sources_of(call, work, sizes, BLOCK)
        V: gl.constexpr = sizes.V
        room = Loaded(
            buffer(1, C, BLOCK).index(0), buffer(1, C, BLOCK).index(0), buffer(1, C, V).index(0), buffer(1, C, V).index(0), None,
            buffer(1, BLOCK, V).index(0), buffer(1, BLOCK, V).index(0),
        )  # fmt: skip
        high, low, met, g = buffer(1, C, BLOCK), buffer(1, C, BLOCK), buffer(1, C, BLOCK).index(0), buffer(1, C, BLOCK).index(0)
        tiles = Tiles(room, high, low, met, g, numbers(1, BLOCK, gl.float32).index(0), None)
        each_unsettled(by_levels, item, call, work, sources, tiles, sizes)


def programs(multiprocessors: int) -> int:
    """Number of programs, two per multiprocessor less one: an odd number balances the load if only some heads or channels remain."""
    return 2 * multiprocessors - 1


def options() -> dict[str, int]:
    """Two programs share a multiprocessor: 113 KB and 255 registers each."""
    return dict(num_warps=4)
