"""``gradients`` with a decay per channel and the erase rule for Hopper, in Gluon: blocks of channels that do not settle.

As gradients_channel_levels.py, with two kinds of queries, q and those that read before their token's decay, r, and two kinds of keys, k
and w. At each size of blocks Z has queries q in late halves and keys k in early ones, Y has r and w, each scaled by its own factor, e and
f. With G = dO Vᵀ, G' = dO Uᵀ, N = X Vᵀ and N' = X Uᵀ below the diagonal, U what the erasing writes, X the cotangents of what is read,

    P = (G, Gᵀ) Z + (G', Nᵀ) Y,    dQ += e ∘ P in late halves,    dK += e ∘ P in early ones
    P' = (N, G'ᵀ) Z + (N', N'ᵀ) Y,    dR += f ∘ P' in late halves,    dW += f ∘ P' in early ones

where (below, above) are halves of a matrix as far as they meet. To the decay's gradient go ± Z ∘ P and ± Y ∘ P'. What r has of the token
right before it has no decay within: it goes apart.

Two warpgroups share 64 channels. Values, cotangents and states of the next block are loaded while tokens meet.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from linattn.ops.triton.hopper import tma
from linattn.ops.triton.hopper.chunks import chunk, fetch, of_states, ragged, state_at
from linattn.ops.triton.hopper.common import barriers, buffer, numbers
from linattn.ops.triton.hopper.gradients_channel import split, strips
from linattn.ops.triton.hopper.gradients_channel_levels import choose, cut, in_range, ones
from linattn.ops.triton.hopper.names import barrier, fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait
from linattn.ops.triton.hopper.prepare_channel import BLOCK, NATURAL_RESET, exp2, in_blocks, keep
from linattn.ops.triton.tiles import LOG2E

EACH = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 64, 16]))  # [C, C], the same in both warpgroups
SHARE = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 32, 16]))  # [C, BLOCK], half of the channels in each


@gluon.jit
def unsettled(start, settled, blocks):
    """The first block from ``start`` on, of those of this program, that is left; ``blocks`` if none is."""
    ahead = gl.arange(0, 32, gl.BlockedLayout([1], [32], [8], [0])) * gl.num_programs(0)
    found = blocks
    while start < blocks:
        here = start + ahead
        done = gl.load(settled + here, mask=here < blocks, other=1)
        found = gl.min(gl.where(done == 0, here, blocks), 0)
        start = gl.where(found < blocks, blocks, start + 32 * gl.num_programs(0))
    return found


@gluon.jit
def left(x):
    """A tile as the left operand of a product, from the registers it is in: see prepare_channel.py."""
    x = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x.to(gl.bfloat16)], gl.bfloat16, False, 2)
    return gl.convert_layout(x, gl.DotOperandLayout(0, SHARE, 2), assert_trivial=True)


@gluon.jit
def start_sum(picked, high, low, LOW: gl.constexpr):
    """Sums of the decays that each row of ``picked`` picks, under way."""
    pick = left(picked)
    x = gl.zeros([picked.shape[0], BLOCK], gl.float32, SHARE)
    if LOW:
        x = warpgroup_mma(pick, low.index(0), x, use_acc=False, is_async=True)
        x = warpgroup_mma(pick, high.index(0), x, is_async=True)
    else:
        x = warpgroup_mma(pick, high.index(0), x, use_acc=False, is_async=True)
    return x


@gluon.jit
def halves(decays, head, first, rows, block, C: gl.constexpr):
    """The decays [C / 2, BLOCK] of both halves of a chunk's block, as they lie; 0 past the end. A warp has all tokens of a channel."""
    decay, decay_token, decay_head, split_in = decays
    HALF: gl.constexpr = C // 2
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [16, 2], [1, 8], [1, 0])
    stride = decay_token // 4 * 4
    row = gl.arange(0, HALF, gl.SliceLayout(1, layout))
    channel = block * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(0, layout))
    start = decay + first.to(gl.int64) * stride + (head // split_in).to(gl.int64) * (decay_head // 4 * 4)
    where = start + row[:, None] * stride + channel[None, :]
    early = gl.load(where, mask=(row < rows)[:, None], other=0.0)
    late = gl.load(where + HALF * stride, mask=(row < rows - HALF)[:, None], other=0.0)
    return gl.maximum(early.to(gl.float32), NATURAL_RESET), gl.maximum(late.to(gl.float32), NATURAL_RESET)


@gluon.jit
def passing(states, dstates, to, V: gl.constexpr):
    """By channel, what of the state before the chunk the cotangent after it meets, were there no decay."""
    of_rows: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [8, 1], [1, 0])
    s, ds = in_blocks(states, BLOCK, V), in_blocks(dstates, BLOCK, V)
    both = gl.zeros([BLOCK, BLOCK], gl.float32, of_rows)
    for part in gl.static_range(V // BLOCK):
        both += s.index(part).load(of_rows).to(gl.float32) * ds.index(part).load(of_rows).to(gl.float32)
    to.store(gl.sum(both, 1))


@gluon.jit
def product(a, b, C: gl.constexpr):
    """Of what tokens bring with what others do, under way."""
    nothing = gl.zeros([C, C], gl.float32, EACH)
    return warpgroup_mma(a, b.permute((1, 0)), nothing, use_acc=False, is_async=True)


@gluon.jit
def bring(VECTORS: gl.constexpr, full, sources, tiles, item, work, group, C: gl.constexpr, K: gl.constexpr, V: gl.constexpr,
          SPLIT: gl.constexpr, PACKED: gl.constexpr):  # fmt: skip
    """Begin to load a block's queries and keys, or values, cotangents and states."""
    qd, kd, rd, wd, vd, ud, od, xd, sd, dsd, _, _, _, _ = sources
    qb, kb, rb, wb, vb, ub, ob, xb, sb, dsb, _, _, _, _, _, _, _, _, _, _ = tiles
    blocks, cu, sequences, tokens, heads = work
    if item < blocks:
        place, channel = item // (K // BLOCK), item % (K // BLOCK) * BLOCK
        head, first, rows = chunk(place, cu, sequences, tokens, heads, C, PACKED)
        here = full.index(1 if VECTORS else 0)
        if VECTORS:
            mbarrier.expect(here, 8 * C * BLOCK)
            shared = [head // group, first + rows, C - rows, channel]
            own = [head // SPLIT, first + rows, C - rows, channel]
            tma.load(qd, shared, here, qb.reshape((1, 1, C, BLOCK)))
            tma.load(kd, shared, here, kb.reshape((1, 1, C, BLOCK)))
            tma.load(rd, own, here, rb.reshape((1, 1, C, BLOCK)))
            tma.load(wd, own, here, wb.reshape((1, 1, C, BLOCK)))
        else:
            mbarrier.expect(here, 8 * C * V + 4 * BLOCK * V)
            fetch(od, head, first, rows, here, ob, C, V)
            of_state = state_at(place, channel, K, V, SPLIT)
            tma.load(sd, of_state, here, sb)
            fetch(xd, head, first, rows, here, xb, C, V)
            fetch(vd, head, first, rows, here, vb, C, V)
            tma.load(dsd, of_state, here, dsb)
            fetch(ud, head, first, rows, here, ub, C, V)


@gluon.jit
def by_levels(
    item, next_item, phase, full, sources, tiles, vectors, decays, ddecay, work, group, scale,
    C: gl.constexpr, K: gl.constexpr, V: gl.constexpr, SPLIT: gl.constexpr, PACKED: gl.constexpr, DDECAY: gl.constexpr, LOW: gl.constexpr,
):  # fmt: skip
    """All gradients of a block of channels of a chunk."""
    _, _, _, _, _, _, _, _, _, _, dqd, dkd, drd, dwd = sources
    qb, kb, rb, wb, vb, ub, ob, xb, sb, dsb, high, low, g_tile, gn_tile, ng_tile, n_tile, met, met_before, sent_high, sent_low = tiles
    faded, past, owned, owned_w = vectors
    _, cu, sequences, tokens, heads = work
    place, block = item // (K // BLOCK), item % (K // BLOCK)
    head, first, rows = chunk(place, cu, sequences, tokens, heads, C, PACKED)
    of_tokens: gl.constexpr = gl.SliceLayout(1, SHARE)
    of_channels: gl.constexpr = gl.SliceLayout(0, SHARE)
    nought = heads % group  # but no compiler knows: see prepare_channel.py
    token = gl.arange(0, C, gl.SliceLayout(1, EACH))[:, None] + nought
    other = gl.arange(0, C, gl.SliceLayout(0, EACH))[None, :]
    nothing = gl.zeros([C, BLOCK], gl.float32, SHARE)

    early, late = halves(decays, head, first, rows, block, C)
    ORDERS: gl.constexpr = 1.0 if LOW else LOG2E  # what comes as two numbers of bfloat16 can as well be binary orders
    if LOW:
        early = early * LOG2E
        late = late * LOG2E
    parts = (high.index(0), low.index(0) if LOW else None)
    keep(early, parts, 0, C // 2)
    keep(late, parts, C // 2, C // 2)
    faded.store(exp2(gl.sum(early + late, 0) * ORDERS))
    fence_async_shared()
    barrier()

    # From outside the chunk.
    x = start_sum(gl.where(other <= token, 1.0, 0.0), high, low, LOW)
    x_before = start_sum(gl.where(other < token, 1.0, 0.0), high, low, LOW)
    y = start_sum(gl.where(other > token, 1.0, 0.0), high, low, LOW)
    mbarrier.wait(full.index(0), phase)
    if DDECAY:
        passing(sb, dsb, past, V)
    x, x_before, y = warpgroup_mma_wait(0, deps=[x, x_before, y])
    dq = warpgroup_mma(ob, sb.permute((1, 0)), nothing, use_acc=False, is_async=True)
    dr = warpgroup_mma(xb, sb.permute((1, 0)), nothing, use_acc=False, is_async=True)
    dk = warpgroup_mma(vb, dsb.permute((1, 0)), nothing, use_acc=False, is_async=True)
    dw = warpgroup_mma(ub, dsb.permute((1, 0)), nothing, use_acc=False, is_async=True)
    x = exp2(x * ORDERS) * scale
    x_before = exp2(x_before * ORDERS)
    y = exp2(y * ORDERS)
    mbarrier.wait(full.index(1), phase)
    dq, dr, dk, dw = warpgroup_mma_wait(0, deps=[dq, dr, dk, dw])
    dq = dq * x
    dr = dr * x_before
    dk = dk * y
    dw = dw * y
    cross = qb.load(SHARE).to(gl.float32) * dq
    cross_before = rb.load(SHARE).to(gl.float32) * dr
    if DDECAY:
        split(kb.load(SHARE).to(gl.float32) * dk + wb.load(SHARE).to(gl.float32) * dw, sent_high, sent_low)

    # What tokens have of each other's values, but for decays; neighbours that have none between them right away.
    below, above = product(ob, vb, C), product(vb, ob, C)
    below, above = warpgroup_mma_wait(0, deps=[below, above])
    owned.store(gl.sum(gl.where(token == other, below, 0.0), 1) * scale)
    g_tile.store((gl.where(token > other, below, above) * scale).to(gl.bfloat16))
    below, above = product(ob, ub, C), product(vb, xb, C)
    below, above = warpgroup_mma_wait(0, deps=[below, above])
    owned_w.store(gl.sum(gl.where(token == other, below, 0.0), 1) * scale)
    near = left(gl.where(token == other - 1, above, 0.0))
    gn_tile.store(gl.where(token > other, below * scale, gl.where(token == other - 1, 0.0, above)).to(gl.bfloat16))
    dk = warpgroup_mma(near, rb, dk, is_async=True)
    dk = warpgroup_mma_wait(0, deps=[dk])
    below, above = product(xb, vb, C), product(ub, ob, C)
    below, above = warpgroup_mma_wait(0, deps=[below, above])
    near = left(gl.where(token == other + 1, below, 0.0))
    ng_tile.store(gl.where(token > other, gl.where(token == other + 1, 0.0, below), above * scale).to(gl.bfloat16))
    dr = warpgroup_mma(near, kb, dr, is_async=True)
    dr = warpgroup_mma_wait(0, deps=[dr])
    below, above = product(xb, ub, C), product(ub, xb, C)
    below, above = warpgroup_mma_wait(0, deps=[below, above])
    near = left(gl.where(token == other + 1, below, 0.0))
    near_above = left(gl.where(token == other - 1, above, 0.0))
    below = gl.where(token == other + 1, 0.0, below)
    n_tile.store(gl.where(token > other, below, gl.where(token == other - 1, 0.0, above)).to(gl.bfloat16))
    dr = warpgroup_mma(near, wb, dr, is_async=True)
    dw = warpgroup_mma(near_above, rb, dw, is_async=True)
    dr, dw = warpgroup_mma_wait(0, deps=[dr, dw])
    barrier()  # values, cotangents and states have been read, and what they gave is there
    bring(False, full, sources, tiles, next_item, work, group, C, K, V, SPLIT, PACKED)

    # From each other.
    m = C // 2
    while m > 0:
        token = gl.arange(0, C, gl.SliceLayout(1, EACH))[:, None] + nought * m  # again: there is no room to keep what depends on it
        upper = (token & m) != 0
        middle = (token | (2 * m - 1)) - m
        start = gl.where(upper, middle, token) + 1
        evens, odds, at_byte = in_range(start, gl.where(upper, token - middle, middle - token), other)
        orders = start_sum(ones(evens, odds, at_byte), high, low, LOW)
        evens, odds, at_byte = in_range(start, gl.where(upper, token - middle - 1, middle - token), other)
        orders_before = start_sum(ones(evens, odds, at_byte), high, low, LOW)
        evens, odds, at_byte = in_range((token ^ m) & -m, token * 0 + m, other)
        first_by = left(cut(g_tile.load(EACH), evens, odds, at_byte))
        second_by = left(cut(gn_tile.load(EACH), evens, odds, at_byte))
        row = gl.arange(0, C, of_tokens)[:, None] + nought * m
        is_late = gl.where((row & m) != 0, -1, 0).to(gl.int16)
        late_half = gl.where((row & m) != 0, 1.0, 0.0)
        early_half = 1.0 - late_half
        orders, orders_before = warpgroup_mma_wait(0, deps=[orders, orders_before])
        e = exp2(orders * ORDERS)
        f = exp2(orders_before * ORDERS)
        barrier()  # everybody's products of the last size are done
        met.store((choose(is_late, qb.load(SHARE), kb.load(SHARE)).to(gl.float32) * e).to(gl.bfloat16))
        met_before.store((choose(is_late, rb.load(SHARE), wb.load(SHARE)).to(gl.float32) * f).to(gl.bfloat16))
        fence_async_shared()
        barrier()
        p = warpgroup_mma(first_by, met, nothing, use_acc=False, is_async=True)
        p = warpgroup_mma(second_by, met_before, p, is_async=True)
        third_by = left(cut(ng_tile.load(EACH), evens, odds, at_byte))
        fourth_by = left(cut(n_tile.load(EACH), evens, odds, at_byte))
        p_before = warpgroup_mma(third_by, met, nothing, use_acc=False, is_async=True)
        p_before = warpgroup_mma(fourth_by, met_before, p_before, is_async=True)
        p = warpgroup_mma_wait(2, deps=[p])
        if DDECAY:
            cross += met.load(SHARE).to(gl.float32) * p * (late_half - early_half)
        p = p * e
        dq += p * late_half
        dk += p * early_half
        p_before = warpgroup_mma_wait(0, deps=[p_before])
        if DDECAY:
            c = met_before.load(SHARE).to(gl.float32) * p_before
            cross -= c * early_half
            cross_before += c * late_half
        p_before = p_before * f
        dr += p_before * late_half
        dw += p_before * early_half
        m = m // 2

    # From themselves.
    own, own_w = owned.load(of_tokens)[:, None], owned_w.load(of_tokens)[:, None]
    of_q = qb.load(SHARE).to(gl.float32)
    dq += own * kb.load(SHARE).to(gl.float32) + own_w * wb.load(SHARE).to(gl.float32)
    dk += own * of_q
    dw += own_w * of_q
    barrier()  # decays, queries, keys and what met have been read
    qb.store(dq.to(gl.bfloat16))
    kb.store(dk.to(gl.bfloat16))
    rb.store(dr.to(gl.bfloat16))
    wb.store(dw.to(gl.bfloat16))
    if DDECAY:
        split(cross, high.index(0), low.index(0))
        split(cross_before, met, met_before)
    fence_async_shared()
    barrier()
    to = [head, first + rows, C - rows, block * BLOCK]
    tma.store(dqd, to, qb.reshape((1, 1, C, BLOCK)))
    tma.store(dkd, to, kb.reshape((1, 1, C, BLOCK)))
    tma.store(drd, to, rb.reshape((1, 1, C, BLOCK)))
    tma.store(dwd, to, wb.reshape((1, 1, C, BLOCK)))
    if DDECAY:
        earlier, here_on = left(gl.where(other < token, 1.0, 0.0)), left(gl.where(other >= token, 1.0, 0.0))
        later = left(gl.where(other > token, 1.0, 0.0))
        dd = warpgroup_mma(earlier, sent_low, nothing, use_acc=False, is_async=True)
        dd = warpgroup_mma(here_on, low.index(0), dd, is_async=True)
        dd = warpgroup_mma(later, met_before, dd, is_async=True)
        dd = warpgroup_mma(earlier, sent_high, dd, is_async=True)
        dd = warpgroup_mma(here_on, high.index(0), dd, is_async=True)
        dd = warpgroup_mma(later, met, dd, is_async=True)
        through = (past.load(of_channels) * faded.load(of_channels))[None, :]
        dd = warpgroup_mma_wait(0, deps=[dd])
        dd = dd + through
        row = gl.arange(0, C, of_tokens)[:, None] + nought
        channel = gl.arange(0, BLOCK, of_channels)
        where = ddecay + (first.to(gl.int64) + row) * heads * K + head * K + block * BLOCK + channel[None, :]
        gl.store(where, dd.to(ddecay.dtype.element_ty), mask=row < rows)
    tma.store_wait(0)
    barrier()  # nobody is still reading
    bring(True, full, sources, tiles, next_item, work, group, C, K, V, SPLIT, PACKED)


@gluon.jit
def seek(item, settled, work, C: gl.constexpr, K: gl.constexpr, PACKED: gl.constexpr):
    """The first block from ``item`` on, of those of this program, that is left and has tokens."""
    blocks, cu, sequences, tokens, heads = work
    item = unsettled(item, settled, blocks)
    if PACKED:
        _, _, rows = chunk(item // (K // BLOCK), cu, sequences, tokens, heads, C, PACKED)
        while (item < blocks) & (rows <= 0):
            item = unsettled(item + gl.num_programs(0), settled, blocks)
            _, _, rows = chunk(item // (K // BLOCK), cu, sequences, tokens, heads, C, PACKED)
    return item


@gluon.jit(do_not_specialize=[
    "q_token", "q_head", "k_token", "k_head", "v_token", "v_head", "read_token", "read_head", "write_token", "write_head",
    "decay_token", "decay_head", "beta_token", "beta_head", "do_token", "do_head", "sequences", "tokens", "heads", "group", "chunks_before",
])  # fmt: skip
def gradients(
    q, k, v, read, write, decay, beta, bonus, do, cu,
    values, de, states, dstates,
    dq, dk, dread, dwrite, ddecay, dbeta, dbonus, settled,
    q_token, q_head, k_token, k_head, v_token, v_head, read_token, read_head, write_token, write_head, decay_token, decay_head,
    beta_token, beta_head, do_token, do_head,
    sequences, tokens, heads, group, scale, chunks_before,
    K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, BK: gl.constexpr, BV: gl.constexpr, DECAY: gl.constexpr, RULE: gl.constexpr,
    BEFORE: gl.constexpr, PACKED: gl.constexpr, BITS: gl.constexpr, PRECISION: gl.constexpr, kind: gl.constexpr,
    SPLIT: gl.constexpr, DDECAY: gl.constexpr,
):  # fmt: skip
    if PACKED:
        chunks = tokens // C + sequences
        length = tokens
    else:
        chunks = (tokens + C - 1) // C * sequences
        length = tokens * sequences
    places = chunks * heads
    blocks = places * (K // BLOCK)
    work = (blocks, cu, sequences, tokens, heads)
    item = seek(gl.program_id(0), settled, work, C, K, PACKED)
    if item < blocks:
        key_heads = heads // group
        LOW: gl.constexpr = decay.dtype.element_ty != gl.bfloat16
        square: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK, V], gl.bfloat16)
        sources = (
            strips(q, length, q_token, key_heads, q_head, C, K),
            strips(k, length, k_token, key_heads, k_head, C, K),
            strips(read, length, read_token, heads // SPLIT, read_head, C, K),
            strips(write, length, write_token, heads // SPLIT, write_head, C, K),
            ragged(v, length, v_token, heads, v_head, C, V),
            ragged(values, length, heads * V, heads, V, C, V),
            ragged(do, length, do_token, heads, do_head, C, V),
            ragged(de, length, heads * V, heads, V, C, V),
            of_states(states, places, K, V, SPLIT, BLOCK, square),
            of_states(dstates, places, K, V, SPLIT, BLOCK, square),
            strips(dq, length, heads * K, heads, K, C, K),
            strips(dk, length, heads * K, heads, K, C, K),
            strips(dread, length, heads * K, heads, K, C, K),
            strips(dwrite, length, heads * K, heads, K, C, K),
        )
        tiles = (
            buffer(1, C, BLOCK).index(0), buffer(1, C, BLOCK).index(0), buffer(1, C, BLOCK).index(0), buffer(1, C, BLOCK).index(0),
            buffer(1, C, V).index(0), buffer(1, C, V).index(0), buffer(1, C, V).index(0), buffer(1, C, V).index(0),
            buffer(1, BLOCK, V).index(0), buffer(1, BLOCK, V).index(0), buffer(1, C, BLOCK), buffer(1, C, BLOCK),
            buffer(1, C, C).index(0), buffer(1, C, C).index(0), buffer(1, C, C).index(0), buffer(1, C, C).index(0),
            buffer(1, C, BLOCK).index(0), buffer(1, C, BLOCK).index(0), buffer(1, C, BLOCK).index(0), buffer(1, C, BLOCK).index(0),
        )  # fmt: skip
        vectors = (
            numbers(1, BLOCK, gl.float32).index(0), numbers(1, BLOCK, gl.float32).index(0),
            numbers(1, C, gl.float32).index(0), numbers(1, C, gl.float32).index(0),
        )  # fmt: skip
        full = barriers(2, 1)
        fence_async_shared()
        barrier()
        bring(False, full, sources, tiles, item, work, group, C, K, V, SPLIT, PACKED)
        bring(True, full, sources, tiles, item, work, group, C, K, V, SPLIT, PACKED)
        decays = (decay, decay_token, decay_head, SPLIT)
        phase = 0
        while item < blocks:
            next_item = seek(item + gl.num_programs(0), settled, work, C, K, PACKED)
            by_levels(
                item, next_item, phase, full, sources, tiles, vectors, decays, ddecay, work, group, scale, C, K, V, SPLIT, PACKED, DDECAY,
                LOW,
            )  # fmt: skip
            phase ^= 1
            item = next_item


def programs(multiprocessors: int) -> int:
    """One a multiprocessor, or one less: an odd number has them share whichever heads and channels it is that do not settle."""
    return multiprocessors - 1 + multiprocessors % 2


def options() -> dict[str, int]:
    """Two warpgroups with all the registers that a thread can have."""
    return dict(num_warps=8)
