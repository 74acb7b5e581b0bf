"""``prepare.prepare`` for the delta rule on Hopper, in Gluon: no decay, or one per head.

One program per chunk and head, of which five share a multiprocessor to hide latency. P and B are side by
side in the rows of their tokens, [B, T, H, 2 C], so that results of later kernels can alias them. With N the
strictly lower part of -diag(β) K Kᵀ, decayed, the inverse is T = (I - N)^-1. Its diagonal blocks D_i [16, 16] come from
substitution in float32, one per warp; then, with X = Tᵀ, whose columns [64, 16] follow from those before them,

    X_i = (I_i + R_i) D_iᵀ        R_j += X_i N_jiᵀ  for all later j,  R = 0 before

on tensor cores: X and R stay in registers, N and D come from shared memory, each factor as the sum of two bfloat16 numbers.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from linattn.ops.triton.hopper.common import add, away_from_zero, weight, whole
from linattn.ops.triton.hopper.names import (
    barrier,
    copy_async,
    copy_commit,
    copy_wait,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from linattn.ops.triton.tiles import HEAD

S = gl.constexpr(16)  # rows of a block that substitution inverts


@gluon.jit
def eights(stride):
    """``stride``, marked for the compiler as a multiple of 8."""
    return stride // 8 * 8


@gluon.jit
def copy(x, time, head, rows, tile, K: gl.constexpr, C: gl.constexpr):
    """Start to copy [rows, K] of ``x`` :class:`chunks.Rows` to shared memory, padded with zeros."""
    source = x.base + time * eights(x.token) + head * eights(x.head)
    stride = eights(x.token)
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // K, K // 8], [4, 1], [1, 0])
    row = gl.arange(0, C, gl.SliceLayout(1, layout))[:, None]
    channel = gl.arange(0, K, gl.SliceLayout(0, layout))[None, :]
    copy_async(tile, source + row * stride + channel, mask=row < rows)
    copy_commit()


@gluon.jit
def save(tile, to, stride, rows, C: gl.constexpr):
    """Write the first ``rows`` of a tile [C, C] of shared memory."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    row = gl.arange(0, C, gl.SliceLayout(1, layout))[:, None]
    column = gl.arange(0, C, gl.SliceLayout(0, layout))[None, :]
    gl.store(to + row * stride + column, tile.load(layout), mask=row < rows)


@gluon.jit
def halves(x):
    """Split ``x`` in two bfloat16 tensors with the sum ``x`` to 16 bits: its upper half, and the remainder."""
    bits = x.to(gl.int32, bitcast=True)
    left = x - (bits & -65536).to(gl.float32, bitcast=True)
    return (bits >> 16).to(gl.int16).to(gl.bfloat16, bitcast=True), left.to(gl.bfloat16)


@gluon.jit
def shelve(x):
    """The ``halves`` of ``x`` [64, 16] in shared memory."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, S], gl.bfloat16)
    high, low = halves(x)
    return gl.allocate_shared_memory(gl.bfloat16, [64, S], layout, high), gl.allocate_shared_memory(gl.bfloat16, [64, S], layout, low)


@gluon.jit
def blocks(x, layout: gl.constexpr):
    """The four [64, 16] side by side in ``x`` [64, 64], without moving registers."""
    even, odd = gl.split(x.reshape([64, 2, 2, S]).permute((0, 3, 1, 2)))
    x0, x2 = gl.split(even)
    x1, x3 = gl.split(odd)
    x0, x1 = gl.convert_layout(x0, layout, assert_trivial=True), gl.convert_layout(x1, layout, assert_trivial=True)
    x2, x3 = gl.convert_layout(x2, layout, assert_trivial=True), gl.convert_layout(x3, layout, assert_trivial=True)
    return x0, x1, x2, x3


@gluon.jit
def beside(x):
    """The [64, 64] of four ``blocks``."""
    return gl.join(gl.join(x[0], x[2]), gl.join(x[1], x[3])).permute((0, 2, 3, 1)).reshape([64, 4 * S])


@gluon.jit
def product(x, high, low, to, layout: gl.constexpr, use_acc: gl.constexpr):
    """to + x (high + low) with ``x`` [64, 16] in registers, ``high`` and ``low`` in shared memory, ``to`` in ``layout``."""
    x_high, x_low = halves(x)
    x_high = gl.convert_layout(x_high, gl.DotOperandLayout(0, layout, 2), assert_trivial=True)
    x_low = gl.convert_layout(x_low, gl.DotOperandLayout(0, layout, 2), assert_trivial=True)
    to = warpgroup_mma(x_low, high, to, use_acc=use_acc, is_async=True)
    to = warpgroup_mma(x_high, low, to, is_async=True)
    to = warpgroup_mma(x_high, high, to, is_async=True)
    return warpgroup_mma_wait(0, deps=[to])


@gluon.jit
def solve(m: gl.constexpr, r, d, row, layout: gl.constexpr):
    """X_m [64, 16] from R [64, 64] and the transposed D of all blocks."""
    x = gl.where(row[:, None] == S * m + gl.arange(0, S, gl.SliceLayout(0, layout))[None, :], 1.0, 0.0)
    if m > 0:
        x += blocks(r, layout)[m]
    return product(x, d[0].slice(S * m, S), d[1].slice(S * m, S), gl.zeros([64, S], gl.float32, layout), layout, False)


@gluon.jit
def update(r, x, n, layout: gl.constexpr, use_acc: gl.constexpr):
    """R plus the contribution of ``x`` to later columns; ``n`` is the block of columns of N."""
    return product(x, n[0].permute((1, 0)), n[1].permute((1, 0)), r, layout, use_acc)


@gluon.jit
def invert(n):
    """(I - N)^-1 [column, 4, row] of four strictly lower triangular blocks N [column, 4, row] in shared memory.

    A thread holds a column of an inverse; each step completes one entry and adds its contribution to later ones.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 1, S], [32, 1, 1], [1, 4, 1], [2, 1, 0])
    column = gl.arange(0, S, gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None, None]
    row = gl.arange(0, S, gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
    x = gl.where(column == row, gl.full([S, 4, S], 1.0, gl.float32, layout), 0.0)
    for i in gl.static_range(S - 1):
        ended = gl.sum(gl.where(row == i, x.to(gl.int32, bitcast=True), 0), 2).to(gl.float32, bitcast=True)  # selects a register
        x = gl.where(row > i, x + ended[:, :, None] * n.slice(i, 1).load(layout), x)
    return x


@gluon.jit
def save_bound(to, own, total, BITS: gl.constexpr):
    """Store an upper bound of the log2 factor by which a chunk with the total decay ``total`` changes a state.

    A token multiplies a state by its decay and by I - β k kᵀ, whose norm is at most the larger of 1 and |1 - β kᵀk|; ``own`` is -β kᵀk.
    """
    growth = gl.log2(gl.maximum(gl.abs(1.0 + own), 1.0))
    last = gl.arange(0, total.shape[0], own.type.layout) == total.shape[0] - 1
    decay = gl.where(last, total.load(own.type.layout).to(gl.float32) * (2.0**-BITS), 0.0)
    gl.store(to, gl.sum(growth + decay, 0))


@gluon.jit
def prepare(call, at, place, K: gl.constexpr, C: gl.constexpr, DECAY: gl.constexpr, BITS: gl.constexpr, kind: gl.constexpr):
    """Store p, b and, if they are requested, the bounds of a state's change."""
    square: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    thin: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, S, 16])
    tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, C], gl.bfloat16)
    rows = at.last - at.first
    time = at.first.to(gl.int64)

    kb = gl.allocate_shared_memory(gl.bfloat16, [C, K], gl.NVMMASharedLayout.get_default_for([C, K], gl.bfloat16))
    qb = gl.allocate_shared_memory(gl.bfloat16, [C, K], gl.NVMMASharedLayout.get_default_for([C, K], gl.bfloat16))
    copy(call.k, time, at.head // call.group, rows, kb, K, C)
    copy(call.q, time, at.head // call.group, rows, qb, K, C)
    row = gl.arange(0, C, gl.SliceLayout(1, thin))
    inside = row < rows
    where = call.beta.base + time * call.beta.token + at.head * call.beta.head + row * call.beta.token
    strength = gl.load(where, mask=inside, other=0.0).to(gl.float32)
    strength = away_from_zero(strength)
    if DECAY == HEAD:
        flat: gl.constexpr = gl.BlockedLayout([2], [32], [4], [0])
        token = gl.arange(0, C, flat)
        inside = token < rows
        where = call.decay.base + time * call.decay.token + at.head * call.decay.head + token * call.decay.token
        d = gl.load(where, mask=inside, other=0.0).to(gl.float32)
        total = gl.allocate_shared_memory(gl.int32, [C], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        total.store(gl.associative_scan(whole(d, BITS), 0, add))

    copy_wait(0)
    fence_async_shared()
    barrier()
    nothing = gl.zeros([C, C], gl.float32, square)
    qk = warpgroup_mma(qb, kb.permute((1, 0)), nothing, use_acc=False, is_async=True)
    kk = warpgroup_mma(kb, kb.permute((1, 0)), nothing, use_acc=False, is_async=True)
    qk, kk = warpgroup_mma_wait(0, deps=[qk, kk])

    i = gl.arange(0, C, gl.SliceLayout(1, square))
    j = gl.arange(0, C, gl.SliceLayout(0, square))
    qk = qk * call.scale
    kk = kk * -gl.convert_layout(strength, gl.SliceLayout(1, square), assert_trivial=True)[:, None]
    if DECAY == HEAD:
        between = weight(total.load(gl.SliceLayout(1, square))[:, None] - total.load(gl.SliceLayout(0, square))[None, :], BITS)
        qk = qk * between
        kk = kk * between
    pb = gl.allocate_shared_memory(gl.bfloat16, [C, C], tile)
    pb.store(gl.where(i[:, None] >= j[None, :], qk, 0.0).to(gl.bfloat16))
    if DECAY == HEAD and call.fade is not None:
        save_bound(call.fade + place, gl.sum(gl.where(i[:, None] == j[None, :], kk, 0.0), 1), total, BITS)

    n0, n1, n2, n3 = blocks(gl.where(i[:, None] > j[None, :], kk, 0.0), thin)
    warp = row[:, None] // S
    own = gl.where(warp < 2, gl.where(warp < 1, n0, n1), gl.where(warp < 3, n2, n3))
    diagonal = gl.allocate_shared_memory(gl.float32, [S, 4, S], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
    diagonal.store(own.reshape([4, S, S]).permute((2, 0, 1)))
    below0, below1, below2 = shelve(n0), shelve(n1), shelve(n2)
    to = (time * call.heads + at.head) * (2 * C)
    save(pb, call.p + to, call.heads * (2 * C), rows, C)

    inverses = shelve(invert(diagonal).permute((1, 0, 2)).reshape([C, S]))
    fence_async_shared()
    x0 = solve(0, nothing, inverses, row, thin)
    r = update(nothing, x0, below0, square, False)
    x1 = solve(1, r, inverses, row, thin)
    r = update(r, x1, below1, square, True)
    x2 = solve(2, r, inverses, row, thin)
    r = update(r, x2, below2, square, True)
    x3 = solve(3, r, inverses, row, thin)
    strength = strength[:, None]
    done = (x0 * strength).to(kind), (x1 * strength).to(kind), (x2 * strength).to(kind), (x3 * strength).to(kind)
    bb = gl.allocate_shared_memory(gl.bfloat16, [C, C], tile)
    bb.permute((1, 0)).store(beside(done))
    save(bb, call.b + to + C, call.heads * (2 * C), rows, C)


def options() -> dict[str, int]:
    """Registers for five programs a multiprocessor."""
    return dict(num_warps=4, maxnreg=96)
