"""``gradients`` with a decay per channel and the erase rule for Hopper, in Gluon: blocks of channels that do not settle.

As levels_plain.py, with two kinds of queries, q and those that read before their token's decay, r, and two kinds of keys, k
and w. At each size of blocks Z has queries q in late halves and keys k in early ones, Y has r and w, each scaled by its own factor, e and
f. With G = dO Vᵀ, G' = dO Uᵀ, N = X Vᵀ and N' = X Uᵀ below the diagonal, U the erasing writes, X the cotangents of the reads,

    P = (G, Gᵀ) Z + (G', Nᵀ) Y,    dQ += e ∘ P in late halves,    dK += e ∘ P in early ones
    P' = (N, G'ᵀ) Z + (N', N'ᵀ) Y,    dR += f ∘ P' in late halves,    dW += f ∘ P' in early ones

where (below, above) are the parts of a matrix for pairs of this size. The decay's gradient gets ± Z ∘ P and ± Y ∘ P'. Between r and the
token right before it there is no decay: these pairs are added separately.

Two warpgroups share 64 channels. Values, cotangents and states of the next block are loaded during the products of pairs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from linattn.ops.triton.hopper import tma
from linattn.ops.triton.hopper.call import gradients_of, values_of, vectors_of
from linattn.ops.triton.hopper.chunks import chunk, fetch, of_states, send, state_at
from linattn.ops.triton.hopper.common import barriers, buffer, numbers
from linattn.ops.triton.hopper.decays import columns, halves, lay_out_orders, save_gradients
from linattn.ops.triton.hopper.levels import choose, cut, first_size, in_range, last_size, roles, unsettled, up_to_middle
from linattn.ops.triton.hopper.names import barrier, fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait
from linattn.ops.triton.hopper.operands import (
    BLOCK,
    C,
    copies,
    exp2,
    held,
    hold,
    in_blocks,
    left,
    passing,
    pick,
    rounded,
    shares,
    split,
    start_products,
    start_sum,
)  # fmt: skip
from linattn.ops.triton.tiles import LOG2E

EACH = gl.constexpr(copies(8))
SHARE = gl.constexpr(shares(8))


class Sources(NamedTuple):
    """Tensors that TMA reads and writes."""

    vectors: Any  # q, k, r, w
    of_v: Any  # v, u, dO, X
    states: Any
    dstates: Any
    gradients: Any  # of q, k, r, w


class Tiles(NamedTuple):
    """Shared memory."""

    vectors: Any  # q, k, r, w, then their gradients
    of_v: Any
    states: Any
    dstates: Any
    high: Any  # decays
    low: Any
    met: Any  # G, G', N, N' with their mirror images
    z: Any  # scaled operands: q and k, r and w
    y: Any
    sent: Any  # summands of the decay's gradient, split in two bfloat16 numbers
    faded: Any  # by channel, the decay of the whole chunk
    past: Any  # by channel, the product of the state and its cotangent
    owned: Any  # weights of a query's own token: of k, of w
    owned_w: Any


@gluon.jit
def product(a, b):
    """Start the product of operands [C, BLOCK] with the transpose of others: [C, C]."""
    nothing = gl.zeros([C, C], gl.float32, EACH)
    return warpgroup_mma(a, b.permute((1, 0)), nothing, use_acc=False, is_async=True)


@gluon.jit
def bring_vectors(full, call, work, sources, tiles, item, sizes):
    """Start to load a block's queries and keys."""
    BLOCKS: gl.constexpr = sizes.K // BLOCK
    if item < work.places * BLOCKS:
        place, channel = item // BLOCKS, item % BLOCKS * BLOCK
        here = chunk(place, work, sizes.PACKED)
        bar = full.index(1)
        mbarrier.expect(bar, 8 * C * BLOCK)
        shared = [here.head // call.group, here.first + here.rows, C - here.rows, channel]
        own = [here.head // sizes.SPLIT, here.first + here.rows, C - here.rows, channel]
        for n in gl.static_range(4):
            tma.load(sources.vectors[n], shared if n < 2 else own, bar, tiles.vectors[n].reshape((1, 1, C, BLOCK)))


@gluon.jit
def bring_values(full, work, sources, tiles, item, sizes):
    """Start to load a block's values, cotangents and states."""
    BLOCKS: gl.constexpr = sizes.K // BLOCK
    if item < work.places * BLOCKS:
        place, channel = item // BLOCKS, item % BLOCKS * BLOCK
        here = chunk(place, work, sizes.PACKED)
        bar = full.index(0)
        mbarrier.expect(bar, 8 * C * sizes.V + 4 * BLOCK * sizes.V)
        fetch(sources.of_v[2], here, bar, tiles.of_v[2], sizes.V)
        of_state = state_at(place, channel, sizes.K, sizes.V, sizes.SPLIT)
        tma.load(sources.states, of_state, bar, tiles.states)
        fetch(sources.of_v[3], here, bar, tiles.of_v[3], sizes.V)
        fetch(sources.of_v[0], here, bar, tiles.of_v[0], sizes.V)
        tma.load(sources.dstates, of_state, bar, tiles.dstates)
        fetch(sources.of_v[1], here, bar, tiles.of_v[1], sizes.V)


@gluon.jit
def by_levels(item, next_item, phase, full, call, work, sources, tiles, sizes):
    """Compute all gradients of a block of channels of a chunk."""
    BLOCKS: gl.constexpr = sizes.K // BLOCK
    of_tokens: gl.constexpr = gl.SliceLayout(1, SHARE)
    of_channels: gl.constexpr = gl.SliceLayout(0, SHARE)
    qb, kb, rb, wb = tiles.vectors
    vb, ub, ob, xb = tiles.of_v
    sb, dsb, high, low = tiles.states, tiles.dstates, tiles.high, tiles.low
    g_tile, gn_tile, ng_tile, n_tile = tiles.met
    sent_high, sent_low = tiles.sent
    place, block = item // BLOCKS, item % BLOCKS
    here = chunk(place, work, sizes.PACKED)
    zero = work.heads % call.group  # 0, unknown to the compiler: see prepare_channel.py
    token = gl.arange(0, C, gl.SliceLayout(1, EACH))[:, None] + zero
    other = gl.arange(0, C, gl.SliceLayout(0, EACH))[None, :]
    nothing = gl.zeros([C, BLOCK], gl.float32, SHARE)

    early, late = halves(call.decays, here, block, columns(gl.num_warps(), 4))
    ORDERS: gl.constexpr = 1.0 if sizes.LOW else LOG2E  # decays split in two bfloat16 numbers are log2
    early, late = lay_out_orders(early, late, high, low, sizes.LOW)
    tiles.faded.store(exp2(gl.sum(early + late, 0) * ORDERS))
    fence_async_shared()
    barrier()

    # From the states at the ends of the chunk.
    x = start_sum(pick(other <= token), high, low, 0, sizes.LOW)
    x_before = start_sum(pick(other < token), high, low, 0, sizes.LOW)
    y = start_sum(pick(other > token), high, low, 0, sizes.LOW)
    mbarrier.wait(full.index(0), phase)
    if sizes.DDECAY:
        tiles.past.store(gl.sum(passing(in_blocks(sb, BLOCK, sizes.V), in_blocks(dsb, BLOCK, sizes.V), sizes.V), 1))
    x, x_before, y = warpgroup_mma_wait(0, deps=[x, x_before, y])
    dq = warpgroup_mma(ob, sb.permute((1, 0)), nothing, use_acc=False, is_async=True)
    dr = warpgroup_mma(xb, sb.permute((1, 0)), nothing, use_acc=False, is_async=True)
    dk = warpgroup_mma(vb, dsb.permute((1, 0)), nothing, use_acc=False, is_async=True)
    dw = warpgroup_mma(ub, dsb.permute((1, 0)), nothing, use_acc=False, is_async=True)
    x = exp2(x * ORDERS) * call.scale
    x_before = exp2(x_before * ORDERS)
    y = exp2(y * ORDERS)
    mbarrier.wait(full.index(1), phase)
    dq, dr, dk, dw = warpgroup_mma_wait(0, deps=[dq, dr, dk, dw])
    dq = dq * x
    dr = dr * x_before
    dk = dk * y
    dw = dw * y
    cross = held(qb) * dq
    cross_before = held(rb) * dr
    if sizes.DDECAY:
        split(held(kb) * dk + held(wb) * dw, sent_high, sent_low)

    # Products of values and cotangents of pairs of tokens, without decays; pairs of neighbours without a decay are added here.
    below, above = product(ob, vb), product(vb, ob)
    below, above = warpgroup_mma_wait(0, deps=[below, above])
    tiles.owned.store(gl.sum(gl.where(token == other, below, 0.0), 1) * call.scale)
    hold(g_tile, gl.where(token > other, below, above) * call.scale)
    below, above = product(ob, ub), product(vb, xb)
    below, above = warpgroup_mma_wait(0, deps=[below, above])
    tiles.owned_w.store(gl.sum(gl.where(token == other, below, 0.0), 1) * call.scale)
    near = left(gl.where(token == other - 1, above, 0.0))
    hold(gn_tile, gl.where(token > other, below * call.scale, gl.where(token == other - 1, 0.0, above)))
    dk = warpgroup_mma(near, rb, dk, is_async=True)
    dk = warpgroup_mma_wait(0, deps=[dk])
    below, above = product(xb, vb), product(ub, ob)
    below, above = warpgroup_mma_wait(0, deps=[below, above])
    near = left(gl.where(token == other + 1, below, 0.0))
    hold(ng_tile, gl.where(token > other, gl.where(token == other + 1, 0.0, below), above * call.scale))
    dr = warpgroup_mma(near, kb, dr, is_async=True)
    dr = warpgroup_mma_wait(0, deps=[dr])
    below, above = product(xb, ub), product(ub, xb)
    below, above = warpgroup_mma_wait(0, deps=[below, above])
    near = left(gl.where(token == other + 1, below, 0.0))
    near_above = left(gl.where(token == other - 1, above, 0.0))
    below = gl.where(token == other + 1, 0.0, below)
    hold(n_tile, gl.where(token > other, below, gl.where(token == other - 1, 0.0, above)))
    dr = warpgroup_mma(near, wb, dr, is_async=True)
    dw = warpgroup_mma(near_above, rb, dw, is_async=True)
    dr, dw = warpgroup_mma_wait(0, deps=[dr, dw])
    barrier()  # values, cotangents and states have been read, and the products are stored
    bring_values(full, work, sources, tiles, next_item, sizes)

    # From pairs of different tokens.
    m = first_size(zero, sizes)
    while m >= last_size(sizes):
        token = gl.arange(0, C, gl.SliceLayout(1, EACH))[:, None] + zero * m  # recomputed: dependent values do not fit into registers
        orders = start_sum(up_to_middle(token, m, other, sizes, False), high, low, 0, sizes.LOW)
        orders_before = start_sum(up_to_middle(token, m, other, sizes, True), high, low, 0, sizes.LOW)
        _, _, first, count = roles(token, m, sizes)
        span = in_range(first, count, other)
        first_by = left(cut(g_tile.load(EACH), span))
        second_by = left(cut(gn_tile.load(EACH), span))
        row = gl.arange(0, C, of_tokens)[:, None] + zero * m
        upper, met_upper, _, _ = roles(row, m, sizes)
        is_late = gl.where(upper, -1, 0).to(gl.int16)
        met_late = gl.where(met_upper, -1, 0).to(gl.int16)
        late_half = gl.where(upper, 1.0, 0.0)
        early_half = 1.0 - late_half
        orders, orders_before = warpgroup_mma_wait(0, deps=[orders, orders_before])
        e = exp2(orders * ORDERS)
        f = exp2(orders_before * ORDERS)
        weight = e
        weight_before = f
        if sizes.SETTLED > 0:
            sign = gl.where(m == C // 4, -ORDERS, ORDERS)
            e = exp2(orders * sign)
            f = exp2(gl.where(m == C // 4, orders, orders_before) * sign)
            sign = gl.where(m == C // 8, -ORDERS, ORDERS)
            weight = exp2(orders * sign)
            weight_before = exp2(gl.where(m == C // 8, orders, orders_before) * sign)
        barrier()  # all warps' products of the last size are done
        hold(tiles.z, choose(met_late, qb.load(SHARE), kb.load(SHARE)).to(gl.float32) * e)
        hold(tiles.y, choose(met_late, rb.load(SHARE), wb.load(SHARE)).to(gl.float32) * f)
        fence_async_shared()
        barrier()
        p = warpgroup_mma(first_by, tiles.z, nothing, use_acc=False, is_async=True)
        p = warpgroup_mma(second_by, tiles.y, p, is_async=True)
        third_by = left(cut(ng_tile.load(EACH), span))
        fourth_by = left(cut(n_tile.load(EACH), span))
        p_before = warpgroup_mma(third_by, tiles.z, nothing, use_acc=False, is_async=True)
        p_before = warpgroup_mma(fourth_by, tiles.y, p_before, is_async=True)
        p = warpgroup_mma_wait(2, deps=[p])
        if sizes.DDECAY:
            hat = held(tiles.z)
            if sizes.SETTLED > 0:
                hat = choose(is_late, qb.load(SHARE), kb.load(SHARE)).to(gl.float32)
                hat = rounded(hat * weight).to(gl.float32)
            cross += hat * p * (late_half - early_half)
        p = p * weight
        dq += p * late_half
        dk += p * early_half
        p_before = warpgroup_mma_wait(0, deps=[p_before])
        if sizes.DDECAY:
            hat = held(tiles.y)
            if sizes.SETTLED > 0:
                hat = choose(is_late, rb.load(SHARE), wb.load(SHARE)).to(gl.float32)
                hat = rounded(hat * weight_before).to(gl.float32)
            c = hat * p_before
            cross -= c * early_half
            cross_before += c * late_half
        p_before = p_before * weight_before
        dr += p_before * late_half
        dw += p_before * early_half
        m = m // 2

    # From each token itself.
    own, own_w = tiles.owned.load(of_tokens)[:, None], tiles.owned_w.load(of_tokens)[:, None]
    of_q = held(qb)
    dq += own * held(kb) + own_w * held(wb)
    dk += own * of_q
    dw += own_w * of_q
    barrier()  # decays, queries, keys and their products have been read
    hold(qb, dq)
    hold(kb, dk)
    hold(rb, dr)
    hold(wb, dw)
    if sizes.DDECAY:
        split(cross, high.index(0), low.index(0))
        split(cross_before, tiles.z, tiles.y)
    fence_async_shared()
    barrier()
    for n in gl.static_range(4):
        send(sources.gradients[n], here, block, tiles.vectors[n])
    if sizes.DDECAY:
        earlier, here_on, later = pick(other < token), pick(other >= token), pick(other > token)
        dd = start_products((
            (earlier, sent_low), (here_on, low.index(0)), (later, tiles.y),
            (earlier, sent_high), (here_on, high.index(0)), (later, tiles.z),
        ))  # fmt: skip
        through = (tiles.past.load(of_channels) * tiles.faded.load(of_channels))[None, :]
        dd = warpgroup_mma_wait(0, deps=[dd])
        dd = dd + through
        row = gl.arange(0, C, of_tokens)[:, None] + zero
        save_gradients(call.ddecay, dd, here, row, block, work, sizes.K)
    tma.store_wait(0)
    barrier()  # all reads are done
    bring_vectors(full, call, work, sources, tiles, next_item, sizes)


@gluon.jit
def seek(item, call, work, sizes):
    """First unfinished block of this program with tokens, from ``item`` on."""
    BLOCKS: gl.constexpr = sizes.K // BLOCK
    blocks = work.places * BLOCKS
    item = unsettled(item, call.settled, blocks, work, sizes)
    if sizes.PACKED:
        rows = chunk(item // BLOCKS, work, sizes.PACKED).rows
        while (item < blocks) & (rows <= 0):
            item = unsettled(item + gl.num_programs(0), call.settled, blocks, work, sizes)
            rows = chunk(item // BLOCKS, work, sizes.PACKED).rows
    return item


@gluon.jit
def gradients(call, work, sizes):
    """Compute all gradients of the blocks of channels that exceed the range of one product."""
    V: gl.constexpr = sizes.V
    blocks = work.places * (sizes.K // BLOCK)
    item = seek(gl.program_id(0), call, work, sizes)
    if item < blocks:
        key_heads = work.heads // call.group
        vectors, of_v = vectors_of(call, work, sizes, key_heads, BLOCK), values_of(call, work, sizes)
        states = of_states(call.states, work.places, sizes.K, V, sizes.SPLIT, BLOCK)
        dstates = of_states(call.dstates, work.places, sizes.K, V, sizes.SPLIT, BLOCK)
        sources = Sources(vectors, of_v, states, dstates, gradients_of(call, work, sizes, BLOCK))
        tiles = Tiles(
            (buffer(1, C, BLOCK).index(0), buffer(1, C, BLOCK).index(0), buffer(1, C, BLOCK).index(0), buffer(1, C, BLOCK).index(0)),
            (buffer(1, C, V).index(0), buffer(1, C, V).index(0), buffer(1, C, V).index(0), buffer(1, C, V).index(0)),
            buffer(1, BLOCK, V).index(0), buffer(1, BLOCK, V).index(0), buffer(1, C, BLOCK), buffer(1, C, BLOCK),
            (buffer(1, C, C).index(0), buffer(1, C, C).index(0), buffer(1, C, C).index(0), buffer(1, C, C).index(0)),
            buffer(1, C, BLOCK).index(0), buffer(1, C, BLOCK).index(0), (buffer(1, C, BLOCK).index(0), buffer(1, C, BLOCK).index(0)),
            numbers(1, BLOCK, gl.float32).index(0), numbers(1, BLOCK, gl.float32).index(0),
            numbers(1, C, gl.float32).index(0), numbers(1, C, gl.float32).index(0),
        )  # fmt: skip
        full = barriers(2, 1)
        fence_async_shared()
        barrier()
        bring_values(full, work, sources, tiles, item, sizes)
        bring_vectors(full, call, work, sources, tiles, item, sizes)
        phase = 0
        while item < blocks:
            next_item = seek(item + gl.num_programs(0), call, work, sizes)
            by_levels(item, next_item, phase, full, call, work, sources, tiles, sizes)
            phase ^= 1
            item = next_item


def programs(multiprocessors: int) -> int:
    """Number of programs, one per multiprocessor or one less: an odd number balances the load if only some heads or channels remain."""
    return multiprocessors - 1 + multiprocessors % 2


def options() -> dict[str, int]:
    """Two warpgroups with the maximum of registers per thread."""
    return dict(num_warps=8)
