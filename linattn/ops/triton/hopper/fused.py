"""Backward pass within segments for Hopper, in Gluon: no decay or one per head, 128 keys and 128 values.

One kernel scans the cotangent of the state from the last chunk to the first and computes the gradients of each chunk as well: the
cotangent stays in registers and is never written to global memory. Two warpgroups split the work of a chunk in two ways. First each
scans the cotangent of half of the values, transposed as in backward.py, and stores it, rounded, in shared memory. Then each computes
one matrix [C, C] of pairs of tokens, which both read, and the gradients of q and k in half of the channels. One warp prefetches, one
turns decays into weights, and two sum the gradient of the decay. The gradients of q and k alias q and k in shared memory, in two stages.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from linattn.ops.triton.hopper import fused_delta, fused_plain
from linattn.ops.triton.hopper.chunks import beside
from linattn.ops.triton.hopper.common import M, barriers, buffer, described, first_slot, locate, numbers
from linattn.ops.triton.hopper.fused_parts import Bars, Segment, Shape, Sources, Tiles, Weights, add_up, load, weigh
from linattn.ops.triton.hopper.names import fence_async_shared
from linattn.ops.triton.hopper.operands import C
from linattn.ops.triton.tiles import DELTA, HEAD


@gluon.jit(do_not_specialize=[
    "q_token", "q_head", "k_token", "k_head", "v_token", "v_head", "do_token", "do_head", "decay_token", "decay_head",
    "beta_token", "beta_head", "sequences", "tokens", "heads", "group", "length",
])  # fmt: skip
def fused(
    q, k, v, do, decay, beta, cu, p, values, states, ends, dv, dq, dk, ddecay, dbeta, dinitial,
    q_token, q_head, k_token, k_head, v_token, v_head, do_token, do_head, decay_token, decay_head, beta_token, beta_head,
    sequences, tokens, heads, group, scale, length,
    K: gl.constexpr, V: gl.constexpr, DECAY: gl.constexpr, RULE: gl.constexpr, PACKED: gl.constexpr, BITS: gl.constexpr,
    START: gl.constexpr, IN_ROWS: gl.constexpr, REGISTERS: gl.constexpr, FEW: gl.constexpr,
):  # fmt: skip
    """``p`` are P and B of the delta rule, side by side, and ``values`` its writes; they may alias dk and dq."""
    slot = gl.program_id(0)
    head = gl.program_id(1)
    n, first, last, index, begin, _ = locate(slot, cu, sequences, tokens, length, PACKED)
    if (first < last) | (index == 0):
        SUMS: gl.constexpr = ddecay is not None
        rows = last - first
        count = (rows + C - 1) // C
        place = (first_slot(n, begin, tokens, C, PACKED) + (first - begin) // C).to(gl.int64) * heads + head
        time = first.to(gl.int64)
        at = time * heads + head
        shared = head // group
        here = Segment(time, rows, count, head, heads)
        pd, bd, pb, bb, square_full, square_empty = None, None, None, None, None, None
        if RULE == DELTA:
            pd, bd = beside(p, 0, at, rows, heads, C), beside(p, C, at, rows, heads, C)
            pb, bb = buffer(1, C, C), buffer(1, C, C)
            square_full, square_empty = barriers(1, 1), barriers(1, 2)
            ed = described(values + at * V, rows, heads * V, V, C, M)
        else:
            ed = described(v + time * v_token + head * v_head, rows, v_token, V, C, M)
        late = None
        if IN_ROWS:  # early keys of a state alias the gradients of the values
            sd = described(dv + at * V, rows, heads * V, V, C, M)
            late = described(states + at * V, rows, heads * V, V, C, M)
        else:
            sd = described(states + place * K * V, count * heads * K, V, V, K, M)
        sources = Sources(
            pd,
            bd,
            described(q + time * q_token + shared * q_head, rows, q_token, K, C, K),
            described(k + time * k_token + shared * k_head, rows, k_token, K, C, K),
            described(do + time * do_token + head * do_head, rows, do_token, V, C, M),
            ed,
            sd,
            late,
            described(dv + at * V, rows, heads * V, V, C, M),
            described(dq + at * K, rows, heads * K, K, C, M),
            described(dk + at * K, rows, heads * K, K, C, M),
        )
        tiles = Tiles(
            pb, bb, buffer(2, C, K), buffer(2, C, K), buffer(2, C, M), buffer(2, C, M), buffer(2, K, M), buffer(2, K, M),
            buffer(2, C, M), buffer(2, C, C),
        )  # fmt: skip
        weights = Weights(None, None, None, None)
        decay_full, decay_empty, sum_full, sum_empty, results = None, None, None, None, None
        of_decay = (None, 0)
        if DECAY == HEAD:
            weights = Weights(
                numbers(2, C, gl.int32), numbers(2, C, gl.float32), numbers(2, C, gl.float32), numbers(2, 1, gl.float32)
            )  # fmt: skip
            decay_full, decay_empty = barriers(2, 1), barriers(2, 2)
            of_decay = (decay + time * decay_token + head * decay_head, decay_token)
        if SUMS:
            results = numbers(8, C, gl.float32)
            sum_full, sum_empty = barriers(1, 2), barriers(1, 1)
        READERS: gl.constexpr = 2 + (SUMS and RULE != DELTA)  # readers of the states and their cotangents
        bars = Bars(
            square_full, square_empty, barriers(1, 1), barriers(1, READERS), barriers(2, 1), barriers(2, 2),
            decay_full, decay_empty, barriers(1, 2), barriers(1, 2), barriers(1, READERS), sum_full, sum_empty,
        )  # fmt: skip
        fence_async_shared()
        start, end = None, None
        if START:
            start = ends + (slot.to(gl.int64) * heads + head) * K * V
        if dinitial is not None:
            end = dinitial + (n.to(gl.int64) * heads + head) * K * V
        edges = (start, end, index == 0, V)
        if RULE == DELTA:
            strengths = fused_delta.Strengths(beta + time * beta_token + head * beta_head, beta_token, dbeta)
            gl.warp_specialize([
                (fused_delta.half, (0, bars, sources, tiles, weights, strengths, results, edges, here, scale,
                                    Shape(K, DECAY, BITS, SUMS, True))),
                (fused_delta.half, (1, bars, sources, tiles, weights, strengths, results, edges, here, scale,
                                    Shape(K, DECAY, BITS, SUMS, True))),
                (add_up, (bars, tiles, results, of_decay, ddecay, here, Shape(K, DECAY, BITS, SUMS, True))),
                (load, (bars, sources, tiles, here, Shape(K, DECAY, BITS, SUMS, True))),
                (weigh, (bars, weights, of_decay, here, Shape(K, DECAY, BITS, SUMS, True))),
            ], [4, 2, 1, 1], [REGISTERS, FEW, FEW, FEW])  # fmt: skip
        else:
            gl.warp_specialize([
                (fused_plain.half, (0, bars, sources, tiles, weights, results, edges, here, scale, Shape(K, DECAY, BITS, SUMS, False))),
                (fused_plain.half, (1, bars, sources, tiles, weights, results, edges, here, scale, Shape(K, DECAY, BITS, SUMS, False))),
                (add_up, (bars, tiles, results, of_decay, ddecay, here, Shape(K, DECAY, BITS, SUMS, False))),
                (load, (bars, sources, tiles, here, Shape(K, DECAY, BITS, SUMS, False))),
                (weigh, (bars, weights, of_decay, here, Shape(K, DECAY, BITS, SUMS, False))),
            ], [4, 2, 1, 1], [REGISTERS, FEW, FEW, FEW])  # fmt: skip


def options() -> dict[str, int]:
    """Registers of a program. A multiprocessor runs one program at a time."""
    return dict(num_warps=4, REGISTERS=216, FEW=72, maxnreg=168)
