"""Parts of the kernels of linear maps: rows of matrices, the norm and gate before a product, biases and the steps after it."""

from __future__ import annotations

import triton
import triton.language as tl

from linattn.ops.triton.recurrences import LOG2E, _exp2


@triton.jit
def _silu(x):
    return x / (1.0 + _exp2(-x * LOG2E))


@triton.jit
def _prepared(x, weight, gate, k, K: tl.constexpr, BK: tl.constexpr, SIZE: tl.constexpr, eps):
    """Vector, normed and gated, in float32, and a factor for its products.

    The factor of a norm over all channels is a reduction over the program, like the products, so neither waits for the other.
    """
    there = k < K
    a = tl.load(x + k, mask=there, other=0.0).to(tl.float32)
    factor = 1.0
    if SIZE == K:
        factor = 1.0 / tl.sqrt_rn(tl.sum(a * a, 0) / K + eps)
    elif SIZE > 0:
        heads = tl.reshape(a, [BK // SIZE, SIZE])
        heads = heads / tl.sqrt_rn(tl.sum(heads * heads, 1) / SIZE + eps)[:, None]
        a = tl.reshape(heads, [BK])
    if weight is not None:
        a *= weight
    if gate is not None:
        a *= _silu(tl.load(gate + k, mask=there, other=0.0).to(tl.float32))
    return tl.where(there, a, 0.0), factor


@triton.jit
def _norm(norm, k, K: tl.constexpr, WEIGHTS: tl.constexpr):
    return tl.load(norm + k % WEIGHTS, mask=k < K, other=0.0).to(tl.float32)


@triton.jit
def _rows(matrix, n, k, in_n, K: tl.constexpr, BK: tl.constexpr):
    there = in_n[:, None] if K == BK else in_n[:, None] & (k < K)[None, :]
    return tl.load(matrix + n[:, None].to(tl.int64) * K + k[None, :], mask=there, other=0.0)


@triton.jit
def _place(matrices, block, SIZES: tl.constexpr, BN: tl.constexpr):
    """Matrix of the program: its address and its rows, the rows of those before it, and the program's first row."""
    index, matrix, N, rows_before, blocks_before = 0, matrices[0], SIZES[0], 0, 0
    rows: tl.constexpr = SIZES[0]
    passed_rows = rows
    passed = (rows + BN - 1) // BN
    for i in tl.static_range(1, len(SIZES)):
        if block >= passed:
            index, matrix, N, rows_before, blocks_before = i, matrices[i], SIZES[i], passed_rows, passed
        passed_rows += SIZES[i]
        passed += (SIZES[i] + BN - 1) // BN
    return index, matrix, N, rows_before, (block - blocks_before) * BN


@triton.jit
def _bias(biases, index, n, in_n, BN: tl.constexpr, BIASED: tl.constexpr):
    out = tl.zeros([BN], tl.float32)
    for i in tl.static_range(len(BIASED)):
        if BIASED[i]:
            out += tl.load(biases[i] + n, mask=in_n & (index == i), other=0.0).to(tl.float32)
    return out


@triton.jit
def _log1p_exp(x):
    """log(1 + exp(x)) of x <= 0 to float32 accuracy, by a series where exp(x) is small."""
    e = _exp2(x * LOG2E)
    return tl.where(e < 0.01, e * (1.0 - e * (0.5 - e * (1.0 / 3 - e * 0.25))), tl.log(1.0 + e))


@triton.jit
def _finished(out, other, STEP: tl.constexpr):
    """``out`` after the elementwise step number ``STEP`` of FINISHES."""
    if STEP == 0:
        y = tl.minimum(out, 0.0) - _log1p_exp(-tl.abs(out))
    elif STEP == 1:
        y = tl.maximum(out, 0.0) + _log1p_exp(-tl.abs(out))
    elif STEP == 2:
        y = 1.0 / (1.0 + _exp2(-out * LOG2E))
    elif STEP == 3:
        y = 2.0 / (1.0 + _exp2(-2.0 * out * LOG2E)) - 1.0
    elif STEP == 4:
        y = _exp2(out * LOG2E)
    elif STEP == 5:
        y = -out
    elif STEP == 6:
        y = out + other
    elif STEP == 7:
        y = out * other
    else:
        y = out / other
    return y


@triton.jit
def _store(y, wide, place, there, out, constants, index, n, in_n, FINISH: tl.constexpr):
    """Store into y, or into ``wide`` after the steps in FINISH, four numbers each: product, step, constant (-1: none) and value."""
    rounded = index >= 0
    for j in tl.static_range(0, len(FINISH), 4):
        own = index == FINISH[j]
        if j == 0 or FINISH[j - 4] != FINISH[j]:
            value = out
            rounded = rounded & (index != FINISH[j])
        if FINISH[j + 2] < 0:
            value = _finished(value, FINISH[j + 3], FINISH[j + 1])
        else:
            other = tl.load(constants[FINISH[j + 2]] + n, mask=in_n & own, other=1.0).to(tl.float32)
            value = _finished(value, other if len(out.shape) == 1 else other[None, :], FINISH[j + 1])
        if j + 4 == len(FINISH) or FINISH[j + 4] != FINISH[j]:
            tl.store(wide + place, value, mask=there & own)
    tl.store(y + place, out.to(y.dtype.element_ty), mask=there & rounded)


@triton.jit
def _ask(matrix, first, N, begin, K: tl.constexpr, BN: tl.constexpr, CHANNELS: tl.constexpr, LINES: tl.constexpr):
    """Prefetch CHANNELS channels of BN rows from ``begin`` on to the L2 cache: LINES of 128 bytes, a power of two."""
    each: tl.constexpr = 1024 // matrix.dtype.element_ty.primitive_bitwidth
    n = tl.minimum(first + tl.arange(0, BN), N - 1)
    k = tl.minimum(begin + tl.minimum(tl.arange(0, LINES) * each, CHANNELS - 1), K - 1)
    address = matrix + n[:, None].to(tl.int64) * K + k[None, :]
    tl.inline_asm_elementwise("prefetch.global.L2 [$1]; // $0", "=r,l", [address], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _summed(out, part, SPLIT: tl.constexpr, STRIDE: tl.constexpr):
    """Sum of the partial results of all programs of a tile, in their order, in the shape of ``out``."""
    total = tl.zeros_like(out)
    for i in tl.static_range(SPLIT):
        total += tl.load(part + i * STRIDE, cache_modifier=".cg")
    return total
