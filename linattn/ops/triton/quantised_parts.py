"""Parts of the kernels of quantised matrices: the matrix of a program, the vector with its norm and gate, products as floats, the result.

Codes need no conversion to float: in the mantissa they are subnormal numbers, which products read exactly and at full speed; the vector
is scaled to compensate. Scales multiply sums of codes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from linattn.ops.triton.linears_parts import _bias, _silu, _store

LARGE, SMALL = tl.constexpr(2.0**90), tl.constexpr(2.0**-59)  # factors of a vector, and of its product with a number of 2^-149
SIGNS = tl.constexpr(-0x7F7F7F80)  # the highest bit of each byte


@triton.jit
def _place(matrices, scales, block, SIZES: tl.constexpr, ROWS: tl.constexpr, KINDS: tl.constexpr):
    """Matrix of the program and its scales, its rows, the rows of those before it, the program's first row, and its kind."""
    index, matrix, scale, N, kind, rows, rows_before, blocks_before = 0, matrices[0], scales[0], SIZES[0], KINDS[0], ROWS[0], 0, 0
    sizes: tl.constexpr = SIZES[0]
    passed_rows = sizes
    passed = (sizes + ROWS[0] - 1) // ROWS[0]
    for i in tl.static_range(1, len(SIZES)):
        if block >= passed:
            index, matrix, scale, N, kind, rows = i, matrices[i], scales[i], SIZES[i], KINDS[i], ROWS[i]
            rows_before, blocks_before = passed_rows, passed
        passed_rows += SIZES[i]
        passed += (SIZES[i] + ROWS[i] - 1) // ROWS[i]
    return index, matrix, scale, N, kind, rows_before, (block - blocks_before) * rows


@triton.jit
def _four(x, k, K: tl.constexpr, BW: tl.constexpr):
    """Numbers ``k`` [BW, 4] of a vector in float32, as four tensors."""
    a = tl.load(x + k, mask=k < K, other=0.0).to(tl.float32)
    even, odd = tl.split(tl.reshape(a, [BW, 2, 2]))
    a0, a2 = tl.split(even)
    a1, a3 = tl.split(odd)
    return a0, a1, a2, a3


@triton.jit
def _times(a, b):
    return a[0] * b[0], a[1] * b[1], a[2] * b[2], a[3] * b[3]


@triton.jit
def _silus(a):
    return _silu(a[0]), _silu(a[1]), _silu(a[2]), _silu(a[3])


@triton.jit
def _squares(a):
    return a[0] * a[0] + a[1] * a[1] + a[2] * a[2] + a[3] * a[3]


@triton.jit
def _of_heads(squares, BW: tl.constexpr, WORDS: tl.constexpr, SIZE: tl.constexpr, eps):
    """Factor of each word of a vector whose heads have WORDS words and SIZE numbers, from the sums of squares of words."""
    each = 1.0 / tl.sqrt_rn(tl.sum(tl.reshape(squares, [BW // WORDS, WORDS]), 1) / SIZE + eps)
    return tl.reshape(tl.broadcast_to(each[:, None], [BW // WORDS, WORDS]), [BW])


@triton.jit
def _number(words, MASK: tl.constexpr):
    """Bits MASK of words as a subnormal float: 2^-149 times the integer."""
    return (words & MASK).to(tl.float32, bitcast=True)


@triton.jit
def _sums4(words, scale, low, high):
    """Products of rows of 4 bits with a vector: Σ scale Σ (code − 8) a. Byte j of a word has the codes of low[j] and high[j]."""
    upper = words >> 16  # bits within the mantissa
    part = ((low[0] + high[0] + low[1] + high[1] + low[2] + high[2] + low[3] + high[3]) * (-8.0 * SMALL))[None, :]
    part = _number(words, 0xF) * (low[0] * LARGE)[None, :] + part
    part = _number(words, 0xF0) * (high[0] * (LARGE / 16))[None, :] + part
    part = _number(words, 0xF00) * (low[1] * (LARGE / 256))[None, :] + part
    part = _number(words, 0xF000) * (high[1] * (LARGE / 4096))[None, :] + part
    part = _number(upper, 0xF) * (low[2] * LARGE)[None, :] + part
    part = _number(upper, 0xF0) * (high[2] * (LARGE / 16))[None, :] + part
    part = _number(upper, 0xF00) * (low[3] * (LARGE / 256))[None, :] + part
    part = _number(upper, 0xF000) * (high[3] * (LARGE / 4096))[None, :] + part
    return tl.sum(part * scale.to(tl.float32), 1) * (1 / SMALL)


@triton.jit
def _sums8(words, a):
    """Products of rows of 8 bits with a vector, without their scale: Σ code a."""
    words ^= SIGNS  # codes + 128
    upper = words >> 16
    part = ((a[0] + a[1] + a[2] + a[3]) * (-128.0 * SMALL))[None, :]
    part = _number(words, 0xFF) * (a[0] * LARGE)[None, :] + part
    part = _number(words, 0xFF00) * (a[1] * (LARGE / 256))[None, :] + part
    part = _number(upper, 0xFF) * (a[2] * LARGE)[None, :] + part
    part = _number(upper, 0xFF00) * (a[3] * (LARGE / 256))[None, :] + part
    return tl.sum(part, 1) * (1 / SMALL)


@triton.jit
def _ended(
    out, other, residual, y, wide, constants, biases, index, n, in_n, before, BN: tl.constexpr, BIASED: tl.constexpr, FINISH: tl.constexpr,
    GATED: tl.constexpr,
):  # fmt: skip
    out += _bias(biases, index, n, in_n, BN, BIASED)
    if GATED:
        out = _silu(out) * (other + _bias(biases, 1, n, in_n, BN, BIASED))
    if residual is not None:
        out += tl.load(residual + n, mask=in_n, other=0.0).to(tl.float32)
    _store(y, wide, before + n, in_n, out, constants, index, n, in_n, FINISH)
