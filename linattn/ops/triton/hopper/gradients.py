"""``gradients`` for Hopper, in Gluon: plain and delta rule, decay none or per head. Persistent programs, tiles by TMA, products by wgmma.

A program takes chunk after chunk, of every head. One warp loads ahead; one warpgroup makes the gradients of queries, one those of
keys, mirror images that read the same tiles; one warp turns decays into weights, and two add up the gradient of the decay.

    dQ = fade (dO Sᵀ) + (dO Vᵀ ∘ D) K        dK = to_end (V dSᵀ) + (V dOᵀ ∘ Dᵀ) Q

With the delta rule the values are what is written, E, and keys read too, with the cotangent -dE. What pairs of keys have of each
other is symmetric, so one product serves those that read and those that are read:

    dK += (N + Nᵀ) K - fade (dE Sᵀ),   N = -(dE Eᵀ ∘ D) strictly below the diagonal

A tile ends with its sequence: rows past the end read as zeros and are not stored, though others may follow in memory.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from linattn.ops.triton import hopper, prepare
from linattn.ops.triton.hopper import tma
from linattn.ops.triton.hopper.chunks import chunk, fetch, of_states, ragged, state_at
from linattn.ops.triton.hopper.common import SHARED, add, barriers, buffer, give_back, numbers, weight, whole
from linattn.ops.triton.hopper.names import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait
from linattn.ops.triton.plan import Family
from linattn.ops.triton.tiles import CHANNEL, DELTA, ERASE, HEAD, LOG2E

away_from_zero = gluon.jit(prepare.away_from_zero.fn)


@gluon.jit
def load_pair(bars, sources, buffers, i, head, first, rows, C: gl.constexpr, K: gl.constexpr, PAIRS: gl.constexpr):
    """Queries and keys of a chunk."""
    stage = i % PAIRS
    here = bars[2].index(stage)
    mbarrier.wait(bars[3].index(stage), (i // PAIRS & 1) ^ 1)
    mbarrier.expect(here, 4 * C * K)
    fetch(sources[0], head, first, rows, here, buffers[0].index(stage), C, K)
    fetch(sources[1], head, first, rows, here, buffers[1].index(stage), C, K)


@gluon.jit
def load(bars, sources, buffers, work, group, C: gl.constexpr, K: gl.constexpr, V: gl.constexpr, SPLIT: gl.constexpr,
         PACKED: gl.constexpr, STAGES: gl.constexpr, PAIRS: gl.constexpr):  # fmt: skip
    """Bring the tiles of chunk after chunk, ahead of use as far as there is room, in the order in which room comes free."""
    full, empty, _, _, state_full, state_empty, _, _, _, _ = bars
    _, _, vd, od, ed, sd, dsd, _, _ = sources
    _, _, vb, ob, eb, sb, _ = buffers
    places, cu, sequences, tokens, heads = work
    i = 0
    for place in range(gl.program_id(0), places, gl.num_programs(0)):
        head, first, rows = chunk(place, cu, sequences, tokens, heads, C, PACKED)
        if rows > 0:
            stage = i % STAGES
            here = full.index(stage)
            mbarrier.wait(empty.index(stage), (i // STAGES & 1) ^ 1)
            mbarrier.expect(here, (4 if ed is None else 6) * C * V)
            fetch(vd, head, first, rows, here, vb.index(stage), C, V)
            if ed is not None:
                fetch(ed, head, first, rows, here, eb.index(stage), C, V)
            fetch(od, head, first, rows, here, ob.index(stage), C, V)
            if PAIRS == STAGES:
                load_pair(bars, sources, buffers, i, head // group, first, rows, C, K, PAIRS)
            for state in gl.static_range(2):
                there = state_full.index(state)
                mbarrier.wait(state_empty[state].index(0), (i & 1) ^ 1)
                mbarrier.expect(there, 2 * K * V)
                of_state = state_at(place, 0, K, V, SPLIT)
                tma.load(sd if state == 0 else dsd, of_state, there, sb.index(state))
            if PAIRS != STAGES:
                load_pair(bars, sources, buffers, i, head // group, first, rows, C, K, PAIRS)
            i += 1


@gluon.jit
def weigh(bars, weights, decays, work, C: gl.constexpr, PACKED: gl.constexpr, DECAY: gl.constexpr, BITS: gl.constexpr):
    """Turn decays into whole steps summed up to each token, and into what a state fades by up to there and a write to the end."""
    _, _, _, _, _, _, weight_full, weight_empty, _, _ = bars
    total, rows_of = weights
    decay, decay_token, decay_head, split_in = decays
    places, cu, sequences, tokens, heads = work
    layout: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    if DECAY == HEAD:
        i = 0
        for place in range(gl.program_id(0), places, gl.num_programs(0)):
            head, first, rows = chunk(place, cu, sequences, tokens, heads, C, PACKED)
            if rows > 0:
                row = gl.arange(0, C, layout)
                d = gl.load(decay + (first.to(gl.int64) + row) * decay_token + head // split_in * decay_head, mask=row < rows, other=0.0)
                steps = whole(d, BITS)
                sums = gl.associative_scan(steps, 0, add)
                at = i % 2
                mbarrier.wait(weight_empty.index(at), (i // 2 & 1) ^ 1)
                total.index(at).store(sums)
                rows_of.index(2 * at).store(weight(sums, BITS))
                rows_of.index(2 * at + 1).store(weight(gl.sum(steps, 0) - sums, BITS))
                mbarrier.arrive(weight_full.index(at), count=1)
                i += 1


@gluon.jit
def add_up(bars, buffers, results, decays, ddecay, work, C: gl.constexpr, K: gl.constexpr, V: gl.constexpr, PACKED: gl.constexpr,
           SUMS: gl.constexpr):  # fmt: skip
    """The gradient of the decay: of what is read across each token, of what is sent past it, and of what passes the whole chunk."""
    _, _, _, _, state_full, state_empty, _, _, sum_full, sum_empty = bars
    sb = buffers[5]
    decay, decay_token, decay_head, split_in = decays
    places, cu, sequences, tokens, heads = work
    square: gl.constexpr = gl.BlockedLayout([1, C], [32, 1], [2, 1], [1, 0])
    layout: gl.constexpr = gl.SliceLayout(1, square)
    others: gl.constexpr = gl.SliceLayout(0, square)
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [2, 1], [1, 0])
    SLICE: gl.constexpr = 16
    if SUMS:
        i = 0
        for place in range(gl.program_id(0), places, gl.num_programs(0)):
            head, first, rows = chunk(place, cu, sequences, tokens, heads, C, PACKED)
            if rows > 0:
                row = gl.arange(0, C, layout)
                time = first.to(gl.int64) + row
                d = gl.load(decay + time * decay_token + head // split_in * decay_head, mask=row < rows, other=0.0).to(gl.float32)
                faded = gl.exp2(gl.sum(d, 0) * LOG2E)
                mbarrier.wait(state_full.index(0), i & 1)
                mbarrier.wait(state_full.index(1), i & 1)
                both = gl.zeros([SLICE, V], gl.float32, wide)
                for part in gl.static_range(K // SLICE):
                    s = sb.index(0).slice(part * SLICE, SLICE, 0).load(wide).to(gl.float32)
                    both += s * sb.index(1).slice(part * SLICE, SLICE, 0).load(wide).to(gl.float32)
                give_back(state_empty[0].index(0))
                mbarrier.arrive(state_empty[1].index(0), count=1)
                past = faded * gl.sum(gl.sum(both, 1), 0)
                mbarrier.wait(sum_full.index(0), i & 1)
                crossing = results.index(0).load(others) - results.index(1).load(others)
                sending = results.index(2).load(others)
                give_back(sum_empty.index(0))
                later = gl.arange(0, C, others)[None, :] >= row[:, None]
                dd = gl.sum(gl.where(later, crossing[None, :], sending[None, :]), 1) + past
                gl.store(ddecay + time * heads + head, dd.to(ddecay.dtype.element_ty), mask=row < rows)
                i += 1


@gluon.jit
def between(total, layout: gl.constexpr):
    """The steps between each token and each other."""
    return total.load(gl.SliceLayout(1, layout))[:, None] - total.load(gl.SliceLayout(0, layout))[None, :]


@gluon.jit
def recall(at_hand, i, head, first, rows, C: gl.constexpr, K: gl.constexpr, DECAY: gl.constexpr, BITS: gl.constexpr,
           SUMS: gl.constexpr, STAGES: gl.constexpr, PAIRS: gl.constexpr):  # fmt: skip
    """What the keys' own reading gives them, those that read and those that are read, and its part in the decay's gradient.

    The gradient of the strength stands on the diagonal of what the keys read of each other.
    """
    square: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    bars, buffers, weights, strengths = at_hand
    total, rows_of = weights
    full, _, pair_full, _, state_full, state_empty, weight_full, _, _, _ = bars
    _, kb, vb, _, eb, sb, _ = buffers
    beta, beta_token, beta_head, dbeta, heads, split_in = strengths
    token = gl.arange(0, C, gl.SliceLayout(1, square))
    other = gl.arange(0, C, gl.SliceLayout(0, square))[None, :]
    time = first.to(gl.int64) + token
    b = away_from_zero(gl.load(beta + time * beta_token + head // split_in * beta_head, mask=token < rows, other=1.0).to(gl.float32))
    nothing = gl.zeros([C, C], gl.float32, square)
    key, value, cotangent = kb.index(i % PAIRS), vb.index(i % STAGES), eb.index(i % STAGES)
    mbarrier.wait(full.index(i % STAGES), i // STAGES & 1)
    n = warpgroup_mma(cotangent, value.permute((1, 0)), nothing, use_acc=False, is_async=True)
    m = warpgroup_mma(value, cotangent.permute((1, 0)), nothing, use_acc=False, is_async=True)
    mbarrier.wait(state_full.index(0), i & 1)
    d = warpgroup_mma(cotangent, sb.index(0).permute((1, 0)), gl.zeros([C, K], gl.float32, wide), use_acc=False, is_async=True)
    n, m = warpgroup_mma_wait(1, deps=[n, m])
    strength = gl.sum(gl.where(token[:, None] == other, n, 0.0), 1)
    gl.store(dbeta + time * heads + head, (strength / (b * b)).to(dbeta.dtype.element_ty), mask=token < rows)
    n = gl.where(token[:, None] > other, -n, gl.where(token[:, None] < other, -m, 0.0))
    if DECAY == HEAD:
        at = i % 2
        mbarrier.wait(weight_full.index(at), i // 2 & 1)
        n = n * gl.exp2(-gl.abs(between(total.index(at), square)).to(gl.float32) * (2.0**-BITS))
        row = rows_of.index(2 * at).load(gl.SliceLayout(1, wide))
    mbarrier.wait(pair_full.index(i % PAIRS), i // PAIRS & 1)
    crossing = 0.0
    if SUMS:
        a = warpgroup_mma(key, key.permute((1, 0)), nothing, use_acc=False, is_async=True)
        a = warpgroup_mma_wait(0, deps=[a])
        inside = gl.sum(gl.where(token[:, None] > other, n * a, -n * a), 1)
    d = warpgroup_mma_wait(0, deps=[d])
    mbarrier.arrive(state_empty[0].index(0), count=1)
    d = d * (-row[:, None] if DECAY == HEAD else -1.0)
    if SUMS:
        crossing = gl.convert_layout(inside, gl.SliceLayout(1, wide)) + gl.sum(key.load(wide).to(gl.float32) * d, 1)
    n = gl.convert_layout(n.to(gl.bfloat16), gl.DotOperandLayout(0, wide, 2))
    d = warpgroup_mma(n, key, d, is_async=True)
    return warpgroup_mma_wait(0, deps=[d]), crossing


@gluon.jit
def side(
    READS: gl.constexpr, bars, sources, buffers, weights, strengths, results, work, scale,
    C: gl.constexpr, K: gl.constexpr, PACKED: gl.constexpr, DECAY: gl.constexpr, RULE: gl.constexpr, BITS: gl.constexpr,
    SUMS: gl.constexpr, STAGES: gl.constexpr, PAIRS: gl.constexpr,
):  # fmt: skip
    """The gradients of queries (``READS``) or of keys, and both sides' parts in the decay's."""
    square: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, wide, 2)
    full, empty, pair_full, pair_empty, state_full, state_empty, weight_full, weight_empty, sum_full, sum_empty = bars
    _, _, _, _, _, _, _, dqd, dkd = sources
    qb, kb, vb, ob, _, sb, out = buffers
    total, rows_of = weights
    places, cu, sequences, tokens, heads = work
    mine: gl.constexpr = 0 if READS else 1
    FULL: gl.constexpr = RULE == DELTA and SUMS  # registers are: wide products wait for narrow ones
    token = gl.arange(0, C, gl.SliceLayout(1, square))[:, None]
    other = gl.arange(0, C, gl.SliceLayout(0, square))[None, :]
    nothing = gl.zeros([C, C], gl.float32, square)
    none = gl.zeros([C, K], gl.float32, wide)
    i = 0
    for place in range(gl.program_id(0), places, gl.num_programs(0)):
        head, first, rows = chunk(place, cu, sequences, tokens, heads, C, PACKED)
        if rows > 0:
            stage, pair = i % STAGES, i % PAIRS
            if READS:
                vector, partner, own, theirs = qb.index(pair), kb.index(pair), ob.index(stage), vb.index(stage)
            else:
                vector, partner, own, theirs = kb.index(pair), qb.index(pair), vb.index(stage), ob.index(stage)
            if RULE == DELTA and not READS:
                at_hand = (bars, buffers, weights, strengths)
                recalled, crossing = recall(at_hand, i, head, first, rows, C, K, DECAY, BITS, SUMS, STAGES, PAIRS)
            else:
                mbarrier.wait(full.index(stage), i // STAGES & 1)
            g = warpgroup_mma(own, theirs.permute((1, 0)), nothing, use_acc=False, is_async=True)
            if SUMS:
                mbarrier.wait(pair_full.index(pair), i // PAIRS & 1)
                a = warpgroup_mma(vector, partner.permute((1, 0)), nothing, use_acc=False, is_async=True)
            if FULL:
                g, a = warpgroup_mma_wait(0, deps=[g, a])
            else:
                mbarrier.wait(state_full.index(mine), i & 1)
                d = warpgroup_mma(own, sb.index(mine).permute((1, 0)), none, use_acc=False, is_async=True)
                if SUMS:
                    g, a = warpgroup_mma_wait(1, deps=[g, a])
                else:
                    g = warpgroup_mma_wait(1, deps=[g])
            if DECAY == HEAD:
                at = i % 2
                mbarrier.wait(weight_full.index(at), i // 2 & 1)
                steps = between(total.index(at), square)
                g = g * gl.exp2((steps if READS else -steps).to(gl.float32) * (2.0**-BITS))
                row = rows_of.index(2 * at + mine).load(gl.SliceLayout(1, wide))
                give_back(weight_empty.index(at))
            g = gl.where(token >= other if READS else token <= other, g * scale, 0.0)
            if SUMS:
                inside = gl.sum(gl.where(token != other, g * a, 0.0), 1)
            g = gl.convert_layout(g.to(gl.bfloat16), left)
            if FULL:
                mbarrier.wait(state_full.index(mine), i & 1)
                d = warpgroup_mma(own, sb.index(mine).permute((1, 0)), none, use_acc=False, is_async=True)
            d = warpgroup_mma_wait(0, deps=[d])
            mbarrier.arrive(empty.index(stage), count=1)
            mbarrier.arrive(state_empty[mine].index(0), count=1)
            if DECAY == HEAD:
                d = d * (row * scale if READS else row)[:, None]
            elif READS:
                d = d * scale
            if SUMS:
                outside = gl.sum(vector.load(wide).to(gl.float32) * d, 1)
            else:
                mbarrier.wait(pair_full.index(pair), i // PAIRS & 1)
            if RULE == DELTA and not READS:
                d = d + recalled
            d = warpgroup_mma(g, partner, d, is_async=True)
            if SUMS:
                mbarrier.wait(sum_empty.index(0), (i & 1) ^ 1)
                if READS:
                    results.index(0).store(gl.convert_layout(inside, gl.SliceLayout(1, wide)) + outside)
                else:
                    inside = gl.convert_layout(inside, gl.SliceLayout(1, wide))
                    results.index(1).store(inside - crossing if RULE == DELTA else inside)
                    results.index(2).store(outside)
                mbarrier.arrive(sum_full.index(0), count=1)
            d = warpgroup_mma_wait(0, deps=[d])
            mbarrier.arrive(pair_empty.index(pair), count=1)
            tma.store_wait(0)
            out.index(mine).store(d.to(gl.bfloat16))
            fence_async_shared()
            tma.store(dqd if READS else dkd, [head, first + rows, C - rows, 0], out.index(mine).reshape((1, 1, C, K)))
            i += 1
    tma.store_wait(0)


@gluon.jit(do_not_specialize=[
    "q_token", "q_head", "k_token", "k_head", "v_token", "v_head", "read_token", "read_head", "write_token", "write_head",
    "decay_token", "decay_head", "beta_token", "beta_head", "do_token", "do_head", "sequences", "tokens", "heads", "group", "chunks_before",
])  # fmt: skip
def gradients(
    q, k, v, read, write, decay, beta, bonus, do, cu,
    values, de, states, dstates,
    dq, dk, dread, dwrite, ddecay, dbeta, dbonus,
    q_token, q_head, k_token, k_head, v_token, v_head, read_token, read_head, write_token, write_head, decay_token, decay_head,
    beta_token, beta_head, do_token, do_head,
    sequences, tokens, heads, group, scale, chunks_before,
    K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, BK: gl.constexpr, BV: gl.constexpr, DECAY: gl.constexpr, RULE: gl.constexpr,
    BEFORE: gl.constexpr, PACKED: gl.constexpr, BITS: gl.constexpr, PRECISION: gl.constexpr, kind: gl.constexpr,
    SPLIT: gl.constexpr, DDECAY: gl.constexpr, STAGES: gl.constexpr, PAIRS: gl.constexpr, REGISTERS: gl.constexpr, FEW: gl.constexpr,
):  # fmt: skip
    if PACKED:
        chunks = tokens // C + sequences
        length = tokens
    else:
        chunks = (tokens + C - 1) // C * sequences
        length = tokens * sequences
    places = chunks * heads
    work = (places, cu, sequences, tokens, heads)
    key_heads = heads // group
    SUMS: gl.constexpr = DDECAY and DECAY == HEAD
    READERS: gl.constexpr = 1 + (DDECAY and DECAY == HEAD)  # of a state
    vd, ed, eb, strengths = None, None, None, None
    if RULE == DELTA:
        vd, ed = ragged(values, length, heads * V, heads, V, C, V), ragged(de, length, heads * V, heads, V, C, V)
        eb = buffer(STAGES, C, V)
        strengths = (beta, beta_token, beta_head, dbeta, heads, SPLIT)
    else:
        vd = ragged(v, length, v_token, heads, v_head, C, V)
    square: gl.constexpr = gl.NVMMASharedLayout.get_default_for([K, V], gl.bfloat16)
    sources = (
        ragged(q, length, q_token, key_heads, q_head, C, K),
        ragged(k, length, k_token, key_heads, k_head, C, K),
        vd,
        ragged(do, length, do_token, heads, do_head, C, V),
        ed,
        of_states(states, places, K, V, SPLIT, K, square),
        of_states(dstates, places, K, V, SPLIT, K, square),
        ragged(dq, length, heads * K, heads, K, C, K),
        ragged(dk, length, heads * K, heads, K, C, K),
    )
    buffers = (
        buffer(PAIRS, C, K), buffer(PAIRS, C, K), buffer(STAGES, C, V), buffer(STAGES, C, V), eb, buffer(2, K, V), buffer(2, C, K),
    )  # fmt: skip
    weights, results = (None, None), None
    weight_full, weight_empty, sum_full, sum_empty = None, None, None, None
    if DECAY == HEAD:
        weights = (numbers(2, C, gl.int32), numbers(4, C, gl.float32))
        weight_full, weight_empty = barriers(2, 1), barriers(2, 2)
    if SUMS:
        results = numbers(3, C, gl.float32)
        sum_full, sum_empty = barriers(1, 2), barriers(1, 1)
    bars = (  # full and empty: values and cotangents, queries and keys, states, weights, sums
        barriers(STAGES, 1), barriers(STAGES, 2), barriers(PAIRS, 1), barriers(PAIRS, 2),
        barriers(2, 1), (barriers(1, READERS + (RULE == DELTA)), barriers(1, READERS)),
        weight_full, weight_empty, sum_full, sum_empty,
    )  # fmt: skip
    fence_async_shared()
    decays = (decay, decay_token, decay_head, SPLIT)
    gl.warp_specialize([
        (side, (True, bars, sources, buffers, weights, strengths, results, work, scale,
                C, K, PACKED, DECAY, RULE, BITS, DDECAY and DECAY == HEAD, STAGES, PAIRS)),
        (side, (False, bars, sources, buffers, weights, strengths, results, work, scale,
                C, K, PACKED, DECAY, RULE, BITS, DDECAY and DECAY == HEAD, STAGES, PAIRS)),
        (add_up, (bars, buffers, results, decays, ddecay, work, C, K, V, PACKED, DDECAY and DECAY == HEAD)),
        (load, (bars, sources, buffers, work, group, C, K, V, SPLIT, PACKED, STAGES, PAIRS)),
        (weigh, (bars, weights, decays, work, C, PACKED, DECAY, BITS)),
    ], [4, 2, 1, 1], [REGISTERS, FEW, FEW, FEW])  # fmt: skip


def fits(family: Family, chunk: int, q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> bool:
    """Whether this kernel can stand for ``gradients.gradients``."""
    known = family.half and family.rule != ERASE.value and family.decay != CHANNEL.value and not family.before and chunk == 64
    return known and hopper.fits((k.shape[3], v.shape[3]), q, k, v, do)


def options(family: Family, size_k: int, size_v: int) -> dict[str, int]:
    """What the pipeline and the registers of a program are. No more than one program fits a multiprocessor."""
    delta = family.rule == DELTA.value
    fixed = 4 * size_k * size_v + 256 * size_k + 256 * (3 if delta else 2) * size_v + 3072  # bytes: states, results, values, the rest
    pairs = min(2, (SHARED - fixed) // (256 * size_k))
    return dict(STAGES=2, PAIRS=pairs, num_warps=4, REGISTERS=232 if delta else 200, FEW=104, maxnreg=168)
