"""``gradients`` with a decay per channel for Hopper, in Gluon: plain rule, what gradients_channel.py leaves: blocks that do not settle.

Tokens meet in the middle of blocks of 64, 32, 16, ... tokens (see tiles.py), all factors at most 1. At each size a token is a query
in the late half of its block or a key in the early one, and has one factor: with Z the tile of both, scaled, and G = dO Vᵀ below the
diagonal and its mirror image above,

    P = (G ∘ apart) Z,    dQ += e ∘ P in late halves,    dK += e ∘ P in early ones,    and to the decay's gradient ± Z ∘ P

is all a size takes: one product, and one for the sums of decays. What a query has of the state before the chunk and a key of the
cotangent after it is faded from the chunk's start and to its end.

A program takes a block of 64 channels of a chunk after another, as far as they are not ``settled``; two share a multiprocessor and
hide each other's loads.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from linattn.ops.triton.hopper import tma
from linattn.ops.triton.hopper.chunks import chunk, fetch, of_states, ragged, state_at
from linattn.ops.triton.hopper.common import barriers, buffer, numbers
from linattn.ops.triton.hopper.gradients_channel import halves, split, strips
from linattn.ops.triton.hopper.names import barrier, fence_async_shared, mbarrier, reinterpret, warpgroup_mma, warpgroup_mma_wait
from linattn.ops.triton.hopper.prepare_channel import BLOCK, NATURAL_RESET, WIDE, between, exp2, in_blocks, keep, left
from linattn.ops.triton.tiles import LOG2E


@gluon.jit
def unsettled(start, settled, blocks):
    """The first block from ``start`` on, of those of this program, that is left; ``blocks`` if none is."""
    ahead = gl.arange(0, 32, gl.BlockedLayout([1], [32], [4], [0])) * gl.num_programs(0)
    found = blocks
    while start < blocks:
        here = start + ahead
        done = gl.load(settled + here, mask=here < blocks, other=1)
        found = gl.min(gl.where(done == 0, here, blocks), 0)
        start = gl.where(found < blocks, blocks, start + 32 * gl.num_programs(0))
    return found


@gluon.jit
def passing(states, dstates, V: gl.constexpr):
    """By channel, what of the state before the chunk the cotangent after it meets, were there no decay."""
    of_rows: gl.constexpr = gl.BlockedLayout([1, 8], [16, 2], [4, 1], [1, 0])
    s, ds = in_blocks(states, BLOCK, V), in_blocks(dstates, BLOCK, V)
    both = gl.zeros([BLOCK, BLOCK], gl.float32, of_rows)
    for part in gl.static_range(V // BLOCK):
        both += s.index(part).load(of_rows).to(gl.float32) * ds.index(part).load(of_rows).to(gl.float32)
    return gl.convert_layout(gl.sum(both, 1), gl.SliceLayout(0, WIDE))


@gluon.jit
def in_range(first, count, other):
    """[C, C]: of every pair of columns, two bits (of one register) a number, and where to find them, for ``cut`` and ``ones``.

    A row's columns from ``first`` on, ``count`` of them (at most 32), are bits of 64; a thread has two in each byte, made whole bytes.
    """
    bits = ((gl.full_like(count, 1).to(gl.uint64) << count.to(gl.uint64)) - 1) << first.to(gl.uint64)
    bits = bits >> (other & 6).to(gl.uint64)
    half = gl.where(other < 32, bits & 0xFFFFFFFF, bits >> 32).to(gl.uint32).to(gl.int32, bitcast=True)
    return (half & 0x01010101) * 255, (half >> 1 & 0x01010101) * 255, ((other >> 3) & 3) * 0x1111 + 0x4400


@gluon.jit
def cut(a, evens, odds, where):
    """Numbers of ``a`` in range, and 0."""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 t; prmt.b32 t, $2, $4, $6; and.b32 $0, $1, t; }", "=r,r,r,r,r,r,r,r", [a, evens, odds, where], gl.bfloat16, True, 2
    )


@gluon.jit
def ones(evens, odds, where):
    """1 in range, and 0."""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 t; prmt.b32 t, $1, $3, $5; and.b32 $0, t, 0x3f803f80; }", "=r,r,r,r,r,r,r", [evens, odds, where], gl.bfloat16, True, 2
    )


@gluon.jit
def choose(which, a, b):
    """``a`` where ``which``, all bits or none, and otherwise ``b``."""
    return gl.inline_asm_elementwise("lop3.b32 $0, $1, $2, $3, 0xCA;", "=r,r,r,r", [which, a, b], gl.bfloat16, True, 2)


@gluon.jit
def start_sum(picked, high, low, LOW: gl.constexpr):
    """Sums of the decays that each row of ``picked`` picks, under way."""
    pick = left(picked)
    x = gl.zeros([picked.shape[0], BLOCK], gl.float32, WIDE)
    if LOW:
        x = warpgroup_mma(pick, low.index(0), x, use_acc=False, is_async=True)
        x = warpgroup_mma(pick, high.index(0), x, is_async=True)
    else:
        x = warpgroup_mma(pick, high.index(0), x, use_acc=False, is_async=True)
    return x


@gluon.jit
def by_levels(
    place, block, head, first, rows, phase, full, sources, tiles, decays, bonus, ddecay, work, group, scale,
    C: gl.constexpr, K: gl.constexpr, V: gl.constexpr, SPLIT: gl.constexpr, BEFORE: gl.constexpr, PACKED: gl.constexpr,
    DDECAY: gl.constexpr, LOW: gl.constexpr, BYTES: gl.constexpr,
):  # fmt: skip
    """All gradients of a block of channels of a chunk."""
    qd, kd, vd, od, sd, dsd, dqd, dkd = sources
    qb, kb, vb, ob, sb, dsb, high, low, met, gs, faded = tiles
    _, _, _, _, heads = work
    of_channels: gl.constexpr = gl.SliceLayout(0, WIDE)
    nought = heads % group  # but no compiler knows: see prepare_channel.py
    token = gl.arange(0, C, gl.SliceLayout(1, WIDE))[:, None] + nought
    other = gl.arange(0, C, of_channels)[None, :]
    nothing = gl.zeros([C, C], gl.float32, WIDE)
    channel = gl.arange(0, BLOCK, of_channels)
    at = [head // group, first + rows, C - rows, block * BLOCK]

    tma.store_wait(0)
    barrier()  # nobody is still reading
    mbarrier.expect(full, 4 * C * V + 4 * BLOCK * V + 4 * C * BLOCK)
    fetch(vd, head, first, rows, full, vb, C, V)
    fetch(od, head, first, rows, full, ob, C, V)
    tma.load(qd, at, full, qb.reshape((1, 1, C, BLOCK)))
    tma.load(kd, at, full, kb.reshape((1, 1, C, BLOCK)))
    of_state = state_at(place, block * BLOCK, K, V, SPLIT)
    tma.load(sd, of_state, full, sb)
    tma.load(dsd, of_state, full, dsb)

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
    fence_async_shared()
    halfway = reinterpret(gs, gl.float32, [C // 2, BLOCK], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    halfway.store(early + late)
    barrier()
    by_column: gl.constexpr = gl.BlockedLayout([C // 4, 1], [2, 16], [1, 4], [0, 1])
    faded.store(exp2(gl.sum(halfway.load(by_column), 0) * ORDERS))

    # From outside the chunk.
    x = start_sum(gl.where(other < token if BEFORE else other <= token, 1.0, 0.0), high, low, LOW)
    y = start_sum(gl.where(other > token, 1.0, 0.0), high, low, LOW)
    y = warpgroup_mma_wait(0, deps=[y])
    x = warpgroup_mma_wait(0, deps=[x])
    mbarrier.wait(full, phase)
    dq = warpgroup_mma(ob, sb.permute((1, 0)), nothing, use_acc=False, is_async=True)
    dk = warpgroup_mma(vb, dsb.permute((1, 0)), nothing, use_acc=False, is_async=True)
    below = warpgroup_mma(ob, vb.permute((1, 0)), nothing, use_acc=False, is_async=True)
    above = warpgroup_mma(vb, ob.permute((1, 0)), nothing, use_acc=False, is_async=True)
    x = exp2(x * ORDERS) * scale
    y = exp2(y * ORDERS)
    dq = warpgroup_mma_wait(3, deps=[dq])
    dq = dq * x
    cross = qb.load(WIDE).to(gl.float32) * dq
    dk = warpgroup_mma_wait(2, deps=[dk])
    dk = dk * y
    below = warpgroup_mma_wait(1, deps=[below])
    above = warpgroup_mma_wait(0, deps=[above])
    g = gl.where(token > other, below, above) * scale
    own = gl.sum(gl.where(token == other, g, 0.0), 1)[:, None]
    if BEFORE:  # neighbours have no decay between them
        near_below = left(gl.where(token == other + 1, g, 0.0))
        near_above = left(gl.where(token == other - 1, g, 0.0))
        g = gl.where((token == other + 1) | (token == other - 1), 0.0, g)
    gs.store(g.to(gl.bfloat16))
    if BEFORE:
        near = warpgroup_mma(near_below, kb, nothing, use_acc=False, is_async=True)
        dq += warpgroup_mma_wait(0, deps=[near])
        sent = kb.load(WIDE).to(gl.float32) * dk
        near = warpgroup_mma(near_above, qb, nothing, use_acc=False, is_async=True)
        dk += warpgroup_mma_wait(0, deps=[near])
    else:
        sent = kb.load(WIDE).to(gl.float32) * dk
    sent_high, sent_low = in_blocks(vb, C, V).index(0), in_blocks(ob, C, V).index(0)
    if DDECAY:
        barrier()  # values and cotangents have been read
        split(sent, sent_high, sent_low)

    # From each other.
    inner = nothing
    m = C // 2
    while m > (1 if BEFORE else 0):
        token = gl.arange(0, C, gl.SliceLayout(1, WIDE))[:, None] + nought * m  # again: there is no room to keep what depends on it
        upper = (token & m) != 0
        middle = (token | (2 * m - 1)) - m
        if BYTES:
            count = gl.where(upper, token - middle - (1 if BEFORE else 0), middle - token)
            evens, odds, at_byte = in_range(gl.where(upper, middle, token) + 1, count, other)
            chosen = ones(evens, odds, at_byte)
        else:
            picked = between(gl.where(upper, token - 1, token) if BEFORE else token, middle, other)
            chosen = gl.where(picked, 1.0, 0.0)
        orders = start_sum(chosen, high, low, LOW)
        if BYTES:
            evens, odds, at_byte = in_range((token ^ m) & -m, token * 0 + m, other)
            met_by = left(cut(gs.load(WIDE), evens, odds, at_byte))
            z = choose(gl.where(upper, -1, 0).to(gl.int16), qb.load(WIDE), kb.load(WIDE)).to(gl.float32)
        else:
            met_by = left(gl.where(((token ^ other) & -m) == m, gs.load(WIDE), 0.0))
            z = gl.where(upper, qb.load(WIDE), kb.load(WIDE)).to(gl.float32)
        orders = warpgroup_mma_wait(0, deps=[orders])
        e = exp2(orders * ORDERS)
        barrier()  # everybody's product of the last size is done
        met.store((z * e).to(gl.bfloat16))
        fence_async_shared()
        barrier()
        p = warpgroup_mma(met_by, met, nothing, use_acc=False, is_async=True)
        p = warpgroup_mma_wait(0, deps=[p])
        late_half = gl.where(upper, 1.0, 0.0)
        early_half = 1.0 - late_half
        if DDECAY:
            c = met.load(WIDE).to(gl.float32) * p
            if BEFORE:
                cross += c * late_half
                inner -= c * early_half
            else:
                cross += c * (late_half - early_half)
        p = p * e
        dq += p * late_half
        dk += p * early_half
        m = m // 2

    # From themselves.
    of_q = kb.load(WIDE).to(gl.float32)
    of_k = qb.load(WIDE).to(gl.float32)
    if BEFORE:
        u = gl.load(bonus + head // SPLIT * K + block * BLOCK + channel).to(gl.float32)[None, :]
        of_q = of_q * u
        of_k = of_k * u
    dq += own * of_q
    dk += own * of_k
    barrier()  # decays, queries and keys have been read
    qb.store(dq.to(gl.bfloat16))
    kb.store(dk.to(gl.bfloat16))
    if DDECAY:
        split(cross, high.index(0), low.index(0))
        if BEFORE:
            split(inner, met, gs)
    fence_async_shared()
    barrier()
    to = [head, first + rows, C - rows, block * BLOCK]
    tma.store(dqd, to, qb.reshape((1, 1, C, BLOCK)))
    tma.store(dkd, to, kb.reshape((1, 1, C, BLOCK)))
    if DDECAY:
        earlier = left(gl.where(other < token, 1.0, 0.0))
        later = left(gl.where(other > token if BEFORE else other >= token, 1.0, 0.0))
        dd = gl.zeros([C, BLOCK], gl.float32, WIDE)
        dd = warpgroup_mma(earlier, sent_low, dd, use_acc=False, is_async=True)
        dd = warpgroup_mma(later, low.index(0), dd, is_async=True)
        dd = warpgroup_mma(earlier, sent_high, dd, is_async=True)
        dd = warpgroup_mma(later, high.index(0), dd, is_async=True)
        if BEFORE:
            here_on = left(gl.where(other >= token, 1.0, 0.0))
            dd = warpgroup_mma(here_on, gs, dd, is_async=True)
            dd = warpgroup_mma(here_on, met, dd, is_async=True)
        past = (passing(sb, dsb, V) * faded.load(of_channels))[None, :]
        dd = warpgroup_mma_wait(0, deps=[dd])
        dd = dd + past
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
    SPLIT: gl.constexpr, DDECAY: gl.constexpr, BYTES: gl.constexpr,
):  # fmt: skip
    """The bonus's gradient, which knows no decay, is done."""
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
            ragged(v, length, v_token, heads, v_head, C, V),
            ragged(do, length, do_token, heads, do_head, C, V),
            of_states(states, places, K, V, SPLIT, BLOCK, square),
            of_states(dstates, places, K, V, SPLIT, BLOCK, square),
            strips(dq, length, heads * K, heads, K, C, K),
            strips(dk, length, heads * K, heads, K, C, K),
        )
        tiles = (
            buffer(1, C, BLOCK).index(0), buffer(1, C, BLOCK).index(0), buffer(1, C, V).index(0), buffer(1, C, V).index(0),
            buffer(1, BLOCK, V).index(0), buffer(1, BLOCK, V).index(0), buffer(1, C, BLOCK), buffer(1, C, BLOCK),
            buffer(1, C, BLOCK).index(0), buffer(1, C, BLOCK).index(0), numbers(1, BLOCK, gl.float32).index(0),
        )  # fmt: skip
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
                    place, item % BLOCKS, head, first, rows, phase, bars.index(0), sources, tiles, decays, bonus, ddecay, work, group,
                    scale, C, K, V, SPLIT, BEFORE, PACKED, DDECAY, LOW, BYTES,
                )  # fmt: skip
                phase ^= 1
            item = unsettled(item + gl.num_programs(0), settled, blocks)
        tma.store_wait(0)


def programs(multiprocessors: int) -> int:
    """Two a multiprocessor, but for one: an odd number has them share whichever heads and channels it is that do not settle."""
    return 2 * multiprocessors - 1


def options() -> dict[str, int]:
    """Two programs share a multiprocessor: 113 KB and 255 registers each."""
    return dict(num_warps=4, BYTES=True)
