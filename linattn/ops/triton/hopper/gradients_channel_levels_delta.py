"""``gradients`` with a decay per channel and the delta rule for Hopper, in Gluon: blocks of channels that do not settle.

As gradients_channel_levels.py, with values that are what is written, E, and keys that read too, with the cotangent -dE. At each size of
blocks Z has queries in late halves and keys in early ones, R keys in both, all scaled by one factor e. With G = dO Eᵀ and N = -dE Eᵀ below
the diagonal and their mirror images above,

    P = (G ∘ apart) Z,    dQ += e ∘ P in late halves,    dK += e ∘ P in early ones,    and to the decay's gradient ± Z ∘ P
    Q = (N ∘ apart) R,    dK += e ∘ Q in both,                                         and to the decay's gradient ± R ∘ Q

A program holds what it loads of a chunk and what it makes of it in the same memory: values, cotangents and states are used up before
tokens meet. So two share a multiprocessor.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from linattn.ops.triton.hopper import tma
from linattn.ops.triton.hopper.chunks import chunk, fetch, of_states, ragged, state_at
from linattn.ops.triton.hopper.common import barriers, buffer, numbers
from linattn.ops.triton.hopper.gradients_channel import split, strips
from linattn.ops.triton.hopper.gradients_channel_delta import halves
from linattn.ops.triton.hopper.gradients_channel_levels import choose, cut, in_range, ones, programs, start_sum, unsettled
from linattn.ops.triton.hopper.names import barrier, fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait
from linattn.ops.triton.hopper.prepare_channel import BLOCK, NATURAL_RESET, WIDE, exp2, in_blocks, keep, left
from linattn.ops.triton.tiles import LOG2E

__all__ = ["gradients", "options", "programs"]


@gluon.jit
def passing(states, dstates, to, V: gl.constexpr):
    """By channel, what of the state before the chunk the cotangent after it meets, were there no decay."""
    of_rows: gl.constexpr = gl.BlockedLayout([1, 8], [16, 2], [4, 1], [1, 0])
    s, ds = in_blocks(states, BLOCK, V), in_blocks(dstates, BLOCK, V)
    both = gl.zeros([BLOCK, BLOCK], gl.float32, of_rows)
    for part in gl.static_range(V // BLOCK):
        both += s.index(part).load(of_rows).to(gl.float32) * ds.index(part).load(of_rows).to(gl.float32)
    to.store(gl.sum(both, 1))


@gluon.jit
def mirrored(cotangents, values, token, other, scale, C: gl.constexpr):
    """Products of cotangents and values of other tokens: a row's own cotangent with values before it, its value with cotangents after."""
    nothing = gl.zeros([C, C], gl.float32, WIDE)
    below = warpgroup_mma(cotangents, values.permute((1, 0)), nothing, use_acc=False, is_async=True)
    above = warpgroup_mma(values, cotangents.permute((1, 0)), nothing, use_acc=False, is_async=True)
    below = warpgroup_mma_wait(1, deps=[below])
    above = warpgroup_mma_wait(0, deps=[above])
    return gl.where(token > other, below, above) * scale


@gluon.jit
def by_levels(
    place, block, head, first, rows, phase, full, sources, tiles, vectors, decays, ddecay, work, group, scale,
    C: gl.constexpr, K: gl.constexpr, V: gl.constexpr, SPLIT: gl.constexpr, PACKED: gl.constexpr, DDECAY: gl.constexpr, LOW: gl.constexpr,
):  # fmt: skip
    """All gradients of a block of channels of a chunk."""
    qd, kd, ed, od, xd, sd, dsd, dqd, dkd = sources
    qb, kb, eb, ob, xb, sb, dsb, high, low, more = tiles
    faded, past = vectors
    _, _, _, _, heads = work
    of_channels: gl.constexpr = gl.SliceLayout(0, WIDE)
    nought = heads % group  # but no compiler knows: see prepare_channel.py
    token = gl.arange(0, C, gl.SliceLayout(1, WIDE))[:, None] + nought
    other = gl.arange(0, C, of_channels)[None, :]
    nothing = gl.zeros([C, C], gl.float32, WIDE)
    at = [head // group, first + rows, C - rows, block * BLOCK]

    tma.store_wait(0)
    barrier()  # nobody is still reading
    mbarrier.expect(full, 6 * C * V + 4 * BLOCK * V + 4 * C * BLOCK)
    of_state = state_at(place, block * BLOCK, K, V, SPLIT)
    tma.load(sd, of_state, full, sb)
    tma.load(dsd, of_state, full, dsb)
    fetch(od, head, first, rows, full, ob, C, V)
    fetch(xd, head, first, rows, full, xb, C, V)
    fetch(ed, head, first, rows, full, eb, C, V)
    tma.load(qd, at, full, qb.reshape((1, 1, C, BLOCK)))
    tma.load(kd, at, full, kb.reshape((1, 1, C, BLOCK)))

    early, late = halves(decays, place, block, work, C, PACKED)
    early = gl.maximum(early.to(gl.float32), NATURAL_RESET)
    late = gl.maximum(late.to(gl.float32), NATURAL_RESET)
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
    y = start_sum(gl.where(other > token, 1.0, 0.0), high, low, LOW)
    mbarrier.wait(full, phase)
    if DDECAY:
        passing(sb, dsb, past, V)
    y = warpgroup_mma_wait(0, deps=[y])
    x = warpgroup_mma_wait(0, deps=[x])
    dq = warpgroup_mma(ob, sb.permute((1, 0)), nothing, use_acc=False, is_async=True)
    dr = warpgroup_mma(xb, sb.permute((1, 0)), nothing, use_acc=False, is_async=True)
    dk = warpgroup_mma(eb, dsb.permute((1, 0)), nothing, use_acc=False, is_async=True)
    x = exp2(x * ORDERS)
    y = exp2(y * ORDERS)
    dq = warpgroup_mma_wait(2, deps=[dq])
    dq = dq * (x * scale)
    cross = qb.load(WIDE).to(gl.float32) * dq
    dr = warpgroup_mma_wait(1, deps=[dr])
    dr = dr * -x
    cross += kb.load(WIDE).to(gl.float32) * dr
    dk = warpgroup_mma_wait(0, deps=[dk])
    dk = dk * y
    sent_high, sent_low = in_blocks(sb, BLOCK, V).index(0), in_blocks(dsb, BLOCK, V).index(0)
    barrier()  # states have been read
    if DDECAY:
        split(kb.load(WIDE).to(gl.float32) * dk, sent_high, sent_low)
    dk += dr

    # What tokens have of each other's values, but for decays.
    gs = more if V == BLOCK else in_blocks(sb, BLOCK, V).index(1)
    ns, met, met_keys = in_blocks(ob, C, V).index(0), in_blocks(eb, C, V).index(0), in_blocks(xb, C, V).index(0)
    g = mirrored(ob, eb, token, other, scale, C)
    own = gl.sum(gl.where(token == other, g, 0.0), 1)[:, None]
    gs.store(g.to(gl.bfloat16))
    g = mirrored(xb, eb, token, other, -1.0, C)
    barrier()  # values and cotangents have been read
    ns.store(g.to(gl.bfloat16))

    # From each other.
    m = C // 2
    while m > 0:
        token = gl.arange(0, C, gl.SliceLayout(1, WIDE))[:, None] + nought * m  # again: there is no room to keep what depends on it
        upper = (token & m) != 0
        middle = (token | (2 * m - 1)) - m
        evens, odds, at_byte = in_range(gl.where(upper, middle, token) + 1, gl.where(upper, token - middle, middle - token), other)
        orders = start_sum(ones(evens, odds, at_byte), high, low, LOW)
        evens, odds, at_byte = in_range((token ^ m) & -m, token * 0 + m, other)
        met_by = left(cut(gs.load(WIDE), evens, odds, at_byte))
        orders = warpgroup_mma_wait(0, deps=[orders])
        e = exp2(orders * ORDERS)
        barrier()  # everybody's products of the last size are done
        z = choose(gl.where(upper, -1, 0).to(gl.int16), qb.load(WIDE), kb.load(WIDE)).to(gl.float32)
        met.store((z * e).to(gl.bfloat16))
        met_keys.store((kb.load(WIDE).to(gl.float32) * e).to(gl.bfloat16))
        fence_async_shared()
        barrier()
        late_half = gl.where(upper, 1.0, 0.0)
        early_half = 1.0 - late_half
        p = warpgroup_mma(met_by, met, nothing, use_acc=False, is_async=True)
        met_by = left(cut(ns.load(WIDE), evens, odds, at_byte))
        p = warpgroup_mma_wait(0, deps=[p])
        if DDECAY:
            cross += met.load(WIDE).to(gl.float32) * p * (late_half - early_half)
        p = p * e
        dq += p * late_half
        dk += p * early_half
        p = warpgroup_mma(met_by, met_keys, nothing, use_acc=False, is_async=True)
        p = warpgroup_mma_wait(0, deps=[p])
        if DDECAY:
            cross += met_keys.load(WIDE).to(gl.float32) * p * (late_half - early_half)
        dk += p * e
        m = m // 2

    # From themselves.
    dq += own * kb.load(WIDE).to(gl.float32)
    dk += own * qb.load(WIDE).to(gl.float32)
    barrier()  # decays, queries and keys have been read
    qb.store(dq.to(gl.bfloat16))
    kb.store(dk.to(gl.bfloat16))
    if DDECAY:
        split(cross, high.index(0), low.index(0))
    fence_async_shared()
    barrier()
    to = [head, first + rows, C - rows, block * BLOCK]
    tma.store(dqd, to, qb.reshape((1, 1, C, BLOCK)))
    tma.store(dkd, to, kb.reshape((1, 1, C, BLOCK)))
    if DDECAY:
        earlier = left(gl.where(other < token, 1.0, 0.0))
        here_on = left(gl.where(other >= token, 1.0, 0.0))
        dd = gl.zeros([C, BLOCK], gl.float32, WIDE)
        dd = warpgroup_mma(earlier, sent_low, dd, use_acc=False, is_async=True)
        dd = warpgroup_mma(here_on, low.index(0), dd, is_async=True)
        dd = warpgroup_mma(earlier, sent_high, dd, is_async=True)
        dd = warpgroup_mma(here_on, high.index(0), dd, is_async=True)
        through = (past.load(of_channels) * faded.load(of_channels))[None, :]
        dd = warpgroup_mma_wait(0, deps=[dd])
        dd = dd + through
        channel = gl.arange(0, BLOCK, of_channels)
        where = ddecay + (first.to(gl.int64) + token) * heads * K + head * K + block * BLOCK + channel[None, :]
        gl.store(where, dd.to(ddecay.dtype.element_ty), mask=token < rows)


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
    """The strengths' gradient, which knows no decay, is done."""
    if PACKED:
        chunks = tokens // C + sequences
        length = tokens
    else:
        chunks = (tokens + C - 1) // C * sequences
        length = tokens * sequences
    places = chunks * heads
    BLOCKS: gl.constexpr = K // BLOCK
    blocks = places * BLOCKS
    item = unsettled(gl.program_id(0), settled, blocks)
    if item < blocks:
        work = (places, cu, sequences, tokens, heads)
        key_heads = heads // group
        LOW: gl.constexpr = decay.dtype.element_ty != gl.bfloat16
        square: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK, V], gl.bfloat16)
        sources = (
            strips(q, length, q_token, key_heads, q_head, C, K),
            strips(k, length, k_token, key_heads, k_head, C, K),
            ragged(values, length, heads * V, heads, V, C, V),
            ragged(do, length, do_token, heads, do_head, C, V),
            ragged(de, length, heads * V, heads, V, C, V),
            of_states(states, places, K, V, SPLIT, BLOCK, square),
            of_states(dstates, places, K, V, SPLIT, BLOCK, square),
            strips(dq, length, heads * K, heads, K, C, K),
            strips(dk, length, heads * K, heads, K, C, K),
        )
        tiles = (
            buffer(1, C, BLOCK).index(0), buffer(1, C, BLOCK).index(0), buffer(1, C, V).index(0), buffer(1, C, V).index(0),
            buffer(1, C, V).index(0), buffer(1, BLOCK, V).index(0), buffer(1, BLOCK, V).index(0), buffer(1, C, BLOCK),
            buffer(1, C, BLOCK), buffer(1, C, BLOCK).index(0) if V == BLOCK else None,
        )  # fmt: skip
        vectors = (numbers(1, BLOCK, gl.float32).index(0), numbers(1, BLOCK, gl.float32).index(0))
        bars = barriers(1, 1)
        fence_async_shared()
        barrier()
        decays = (decay, decay_token, decay_head, SPLIT)
        phase = 0
        while item < blocks:
            place = item // BLOCKS
            head, first, rows = chunk(place, cu, sequences, tokens, heads, C, PACKED)
            if rows > 0:
                by_levels(
                    place, item % BLOCKS, head, first, rows, phase, bars.index(0), sources, tiles, vectors, decays, ddecay, work, group,
                    scale, C, K, V, SPLIT, PACKED, DDECAY, LOW,
                )  # fmt: skip
                phase ^= 1
            item = unsettled(item + gl.num_programs(0), settled, blocks)
        tma.store_wait(0)


def options() -> dict[str, int]:
    """Two programs share a multiprocessor: 113 KB and 255 registers each."""
    return dict(num_warps=4)
