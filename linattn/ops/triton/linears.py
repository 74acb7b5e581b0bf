"""Linear maps of few vectors on a GPU: several matrices in one launch, with the norm before them and the gate or residual after them.

One vector needs no tensor cores: a program loads a few rows of a matrix at once. Only the vector depends on the previous launch, so
where launches may overlap (Hopper) the matrix is loaded while that one ends. Several vectors are normed by a separate launch and
multiplied in tiles, whose channels several programs may share.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from linattn.ops import gpu, tracing
from linattn.ops.memory import dense
from linattn.ops.torch.linears import FINISHES, Biases, Finish, Norm, portable
from linattn.ops.torch.linears import normed as portable_norm
from linattn.ops.triton import fitting, launch, linear_tiles, norms
from linattn.ops.triton.recurrences import LOG2E, _exp2

LARGEST = 16384  # most channels of a vector, which a program holds
ROWS = 8  # most rows of a program, of all matrices together
BYTES, EACH = 32 << 10, 256  # bytes of rows per program and per thread; fewer threads finish their sums sooner
REGISTERS = 96  # registers of a thread without a norm, so that two launches fit on a multiprocessor
MAPS = 8
PROGRAMS = 128  # about one for each multiprocessor of the largest devices


class Vector(NamedTuple):
    """Constants of :func:`vector_kernel`."""

    SIZES: tuple[int, ...]  # rows of the matrices
    K: int
    BK: int  # K rounded up to a power of two
    BN: int  # rows of a program
    SIZE: int  # channels of a head of the norm; 0: no norm
    WEIGHTS: int  # weights of the norm
    BIASED: tuple[bool, ...]
    FINISH: tuple[int | float, ...]
    GATED: bool
    OVERLAPPED: bool


class Tile(NamedTuple):
    """Constants of :func:`tile_kernel`."""

    SIZES: tuple[int, ...]
    K: int
    BM: int  # vectors, rows and channels of a tile
    BN: int
    BK: int
    SPLIT: int  # programs of a tile
    CHANNELS: int  # channels of a program
    LINES: int  # lines of the cache with a row's channels
    BIASED: tuple[bool, ...]
    FINISH: tuple[int | float, ...]
    GATED: bool
    PRECISION: str
    OVERLAPPED: bool


@triton.jit
def _silu(x):
    return x / (1.0 + _exp2(-x * LOG2E))


@triton.jit
def _prepared(x, weight, gate, k, K: tl.constexpr, BK: tl.constexpr, SIZE: tl.constexpr, eps):
    """Vector, normed and gated, in float32, and a factor that its products must be multiplied with.

    The factor of a norm over all channels is a sum over the program, as the products are, so neither waits for the other.
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
    """``out`` after the step of FINISHES with the number ``STEP``."""
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
def vector_kernel(x, matrices, biases, constants, norm, gate, residual, y, wide, eps, shape: tl.constexpr):
    """Results are stored end to end in y, or, if FINISH has steps for them, at the same places of ``wide``.

    With GATED there are two matrices of one size and one result.
    """
    SIZES: tl.constexpr = shape.SIZES
    K: tl.constexpr = shape.K
    BK: tl.constexpr = shape.BK
    BN: tl.constexpr = shape.BN
    BIASED: tl.constexpr = shape.BIASED
    FINISH: tl.constexpr = shape.FINISH
    GATED: tl.constexpr = shape.GATED
    OVERLAPPED: tl.constexpr = shape.OVERLAPPED
    if OVERLAPPED:
        tl.extra.cuda.gdc_launch_dependents()
    index, matrix, N, before, first = _place(matrices, tl.program_id(0), SIZES, BN)
    n, k = first + tl.arange(0, BN), tl.arange(0, BK)
    in_n = n < N
    rows = _rows(matrix, n, k, in_n, K, BK)
    if GATED:
        others = _rows(matrices[1], n, k, in_n, K, BK)
        other_bias = _bias(biases, 1, n, in_n, BN, BIASED)
    bias = _bias(biases, index, n, in_n, BN, BIASED)
    weight = None if norm is None else _norm(norm, k, K, shape.WEIGHTS)
    if OVERLAPPED:
        tl.extra.cuda.gdc_wait()
    if residual is not None:  # loaded with x, not after the sums over x
        added = tl.load(residual + n, mask=in_n, other=0.0).to(tl.float32)
    a, factor = _prepared(x, weight, gate, k, K, BK, shape.SIZE, eps)
    out = tl.sum(rows.to(tl.float32) * a[None, :], 1) * factor + bias
    if GATED:
        out = _silu(out) * (tl.sum(others.to(tl.float32) * a[None, :], 1) * factor + other_bias)
    if residual is not None:
        out += added
    _store(y, wide, before + n, in_n, out, constants, index, n, in_n, FINISH)


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


@triton.jit(do_not_specialize=["M"])
def tile_kernel(x, matrices, biases, constants, residual, y, wide, parts, counters, M, shape: tl.constexpr):
    """Compute the same for M vectors without a norm; each result is a dense [M, N]. A program has CHANNELS of a tile, a multiple of BK.

    Each of the SPLIT programs of a tile stores its sums in ``parts``. The last one by the counter adds them in a fixed order, whichever
    program it is, and resets the counter. Nothing is counted or stored before the previous launches have ended.
    """
    SIZES: tl.constexpr = shape.SIZES
    K: tl.constexpr = shape.K
    BM: tl.constexpr = shape.BM
    BN: tl.constexpr = shape.BN
    BK: tl.constexpr = shape.BK
    SPLIT: tl.constexpr = shape.SPLIT
    CHANNELS: tl.constexpr = shape.CHANNELS
    BIASED: tl.constexpr = shape.BIASED
    FINISH: tl.constexpr = shape.FINISH
    GATED: tl.constexpr = shape.GATED
    PRECISION: tl.constexpr = shape.PRECISION
    OVERLAPPED: tl.constexpr = shape.OVERLAPPED
    if OVERLAPPED:
        tl.extra.cuda.gdc_launch_dependents()
    index, matrix, N, before, first = _place(matrices, tl.program_id(1), SIZES, BN)
    begin = tl.program_id(2) * CHANNELS
    if OVERLAPPED:
        if tl.program_id(0) == 0:
            _ask(matrix, first, N, begin, K, BN, CHANNELS, shape.LINES)
            if GATED:
                _ask(matrices[1], first, N, begin, K, BN, CHANNELS, shape.LINES)
        tl.extra.cuda.gdc_wait()
    n, m = first + tl.arange(0, BN), tl.program_id(0) * BM + tl.arange(0, BM)
    in_n, in_m = n < N, m < M
    out = tl.zeros([BM, BN], tl.float32)
    if GATED:
        other = tl.zeros([BM, BN], tl.float32)
    for start in range(begin, tl.minimum(begin + CHANNELS, K), BK):
        k = start + tl.arange(0, BK)
        there = in_m[:, None] if K % BK == 0 else in_m[:, None] & (k < K)[None, :]
        a = tl.load(x + m[:, None] * K + k[None, :], mask=there, other=0.0)
        columns = n[None, :].to(tl.int64) * K + k[:, None]
        there = in_n[None, :] if K % BK == 0 else in_n[None, :] & (k < K)[:, None]
        out = tl.dot(a, tl.load(matrix + columns, mask=there, other=0.0), out, input_precision=PRECISION)
        if GATED:
            other = tl.dot(a, tl.load(matrices[1] + columns, mask=there, other=0.0), other, input_precision=PRECISION)
    if SPLIT > 1:
        tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        size: tl.constexpr = BM * BN
        stride: tl.constexpr = 2 * size if GATED else size
        part = parts + tile * (SPLIT * stride) + tl.arange(0, BM)[:, None] * BN + tl.arange(0, BN)[None, :]
        tl.store(part + tl.program_id(2) * stride, out)
        if GATED:
            tl.store(part + tl.program_id(2) * stride + size, other)
        tl.debug_barrier()
        if tl.atomic_add(counters + tile, 1, sem="acq_rel", scope="gpu") != SPLIT - 1:
            return
        tl.store(counters + tile, 0)
        out = _summed(out, part, SPLIT, stride)
        if GATED:
            other = _summed(other, part + size, SPLIT, stride)
    out += _bias(biases, index, n, in_n, BN, BIASED)[None, :]
    if GATED:
        out = _silu(out) * (other + _bias(biases, 1, n, in_n, BN, BIASED)[None, :])
    place, there = m[:, None] * N + n[None, :], in_m[:, None] & in_n[None, :]
    if residual is not None:
        out += tl.load(residual + place, mask=there, other=0.0).to(tl.float32)
    _store(y, wide, before * M + place, there, out, constants, index, n, in_n, FINISH)


def refusal(x: Tensor, *weights: Tensor) -> str | None:
    """Reason why the kernels do not run the call, or None if they do."""
    if x.dtype == torch.float64 or any(w.dtype != x.dtype for w in weights):
        return f"x and the weights must have one dtype of at most 32 bits, but x is {x.dtype}"
    if not x.numel() or len(weights) > MAPS or x.shape[-1] > LARGEST:
        return f"it takes at most {MAPS} matrices of at most {LARGEST} columns, but x has shape {list(x.shape)}"
    if tracing.traced(x, *weights):
        return "tracing is active, which must see operations of torch"
    return fitting.refusal(_name(x, weights))


def _name(x: Tensor, weights: Sequence[Tensor], *_: object) -> Hashable:
    return fitting.alike("linears", *weights), x.shape[-1], x.numel() == x.shape[-1]


def _portable(*arguments: Any) -> list[Tensor]:
    return portable(*(*arguments, ())[:7])  # without the counters, which only the kernels use


@fitting.or_else(_portable, _name)
def linears(
    x: Tensor, weights: Sequence[Tensor], biases: Biases, norm: Norm | None, residual: Tensor | None, gated: bool,
    finish: Finish = (), counters: Tensor | None = None,
) -> list[Tensor]:  # fmt: skip
    """Compute :func:`linattn.ops.linears.linears`, summed in float32 and rounded once."""
    norm = Norm(None, 0.0, 0) if norm is None else norm
    weight, gate, residual, *biases = (None if t is None else dense(t) for t in (norm.weight, norm.gate, residual, *biases))
    x, eps, size = dense(x), norm.eps, norm.size
    vectors, K = x.numel() // x.shape[-1], x.shape[-1]
    sizes = tuple(w.shape[0] for w in weights[: 1 if gated else None])
    biased = tuple(b is not None for b in biases)
    steps, constants = numbered(finish)
    y = torch.empty(vectors * sum(sizes), dtype=x.dtype, device=x.device)
    wide = torch.empty(y.shape, dtype=torch.float32, device=x.device) if steps else None
    overlapped = gpu.capability(y.device) >= (9, 0)
    if size and (vectors > 1 or (size != K and size & (size - 1))):
        x, weight, size, gate = normed(x, Norm(weight, eps, size, gate), overlapped), None, 0, None
    addresses = tuple(weights[0] if b is None else b for b in biases)  # kernels accept no tuples of None
    tensors = (x, tuple(map(dense, weights)), addresses, constants or (x,))
    shared = {"SIZES": sizes, "K": K, "BIASED": biased, "FINISH": steps, "GATED": gated, "OVERLAPPED": overlapped}
    launched: dict[str, Any] = launch.FUSED | ({"launch_pdl": True} if overlapped else {})
    with launch.on_device(x.device):
        if vectors == 1:
            _of_vector((*tensors, weight, gate, residual, y, wide), eps, launched, SIZE=size, **shared)
        else:
            _of_tiles((*tensors, residual, y, wide), vectors, counters, launched, **shared)
    ends = [wide if wide is not None and i < len(finish) and finish[i] else y for i in range(len(sizes))]
    pieces = [end.split([vectors * n for n in sizes])[i] for i, end in enumerate(ends)]
    return [piece.view(*x.shape[:-1], n) for piece, n in zip(pieces, sizes, strict=True)]


def normed(x: Tensor, norm: Norm, overlapped: bool) -> Tensor:
    weight, eps, size, gate = norm
    heads = (-1, x.shape[-1] // size, size)
    pieces, gate = x.view(heads), None if gate is None else gate.view(heads)
    if norms.refusal(pieces, weight, gate, x.dtype) is not None:
        return portable_norm(x, norm)
    weight = weight if weight is None else weight.view(size) if weight.numel() == size else weight.view(heads[1:])
    return norms.forward(pieces, weight, gate, eps, True, x.dtype, overlapped=overlapped).view(x.shape)


def numbered(finish: Finish) -> tuple[tuple[int | float, ...], tuple[Tensor, ...]]:
    """Kernel arguments for ``finish``: the numbers of its steps, and the constants."""
    constants: list[Tensor] = []
    steps: list[int | float] = []
    for i, own in enumerate(finish):
        for name, other in own:
            if isinstance(other, Tensor):
                constants.append(other.contiguous())
            number, value = (len(constants) - 1, 0.0) if isinstance(other, Tensor) else (-1, 0.0 if other is None else float(other))
            steps += [i, list(FINISHES).index(name), number, value]
    return tuple(steps), tuple(constants)


def _of_vector(tensors: tuple, eps: float, launched: dict[str, Any], **shared: Any) -> None:
    x, norm = tensors[0], tensors[4]
    sizes, BK, matrices = shared["SIZES"], triton.next_power_of_2(shared["K"]), 2 if shared["GATED"] else 1
    row = BK * x.element_size() * matrices
    BN = max(min(BYTES // row, ROWS // matrices), 1)
    while BN > 1 and sum(triton.cdiv(n, BN) for n in sizes) < PROGRAMS:
        BN //= 2
    options = {"num_warps": min(max(BN * row // (32 * EACH), 1), 8), **({} if shared["SIZE"] else {"maxnreg": REGISTERS})}
    shape = Vector(BK=BK, BN=BN, WEIGHTS=1 if norm is None else norm.numel(), **shared)
    fitting.launch(vector_kernel, (sum(triton.cdiv(n, BN) for n in sizes), 1, 1), (*tensors, eps), {"shape": shape, **options, **launched})


def _of_tiles(tensors: tuple, vectors: int, counters: Tensor | None, launched: dict[str, Any], **shared: Any) -> None:
    x, K, gated = tensors[0], shared["K"], shared["GATED"]
    countable = 0 if counters is None else counters.numel()
    tiles = linear_tiles.choose(vectors, K, shared["SIZES"], x.element_size(), gated=gated, counters=countable)
    grid = tiles.grid(vectors, shared["SIZES"])
    parts = None
    if tiles.SPLIT > 1:
        parts = torch.empty(prod(grid) * tiles.BM * tiles.BN * (2 if gated else 1), dtype=torch.float32, device=x.device)
    channels = triton.cdiv(K, tiles.BK * tiles.SPLIT) * tiles.BK
    lines = triton.next_power_of_2(triton.cdiv(channels * x.element_size(), 128))
    precision = "ieee" if x.dtype == torch.float32 else "tf32"
    own = {"BM": tiles.BM, "BN": tiles.BN, "BK": tiles.BK, "SPLIT": tiles.SPLIT, "CHANNELS": channels, "LINES": lines}
    options = {"shape": Tile(PRECISION=precision, **own, **shared), "num_warps": tiles.num_warps, "num_stages": tiles.num_stages}
    fitting.launch(tile_kernel, grid, (*tensors, parts, counters, vectors), options | launched)
