"""Linear maps of few vectors on a GPU: several matrices in one launch, with the norm before them and the gate or residual after them.

One vector needs no tensor cores: a program loads a few rows of a matrix at once. Only the vector depends on the previous launch, so
where launches may overlap (Hopper) the matrix is loaded while that one ends. Several vectors are normed by a separate launch and
multiplied in tiles, whose channels several programs may share (split-K). Shared parts of both kernels: linears_parts.py.
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
from linattn.ops.triton.linears_parts import _ask, _bias, _norm, _place, _prepared, _rows, _silu, _store, _summed

LARGEST = 16384  # largest number of channels of a vector, which a program holds
ROWS = 8  # largest number of rows of a program, of all matrices together
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


@triton.jit(do_not_specialize=["M"])
def tile_kernel(x, matrices, biases, constants, residual, y, wide, parts, counters, M, shape: tl.constexpr):
    """Compute the same for M vectors without a norm; each result is a dense [M, N]. A program has CHANNELS of a tile, a multiple of BK.

    Each of the SPLIT programs of a tile stores its sums in ``parts``. The last one by the counter adds them in a fixed order, whichever
    program it is, and resets the counter. Counting and storing wait for the end of the previous launches.
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
        return "tracing is active, which needs PyTorch operations"
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
    return results(y, wide, finish, sizes, x.shape[:-1])


def results(y: Tensor, wide: Tensor | None, finish: Finish, sizes: Sequence[int], shape: Sequence[int]) -> list[Tensor]:
    """Result of each matrix, ``shape`` and its rows in ``sizes``: in ``wide`` if there are steps after its product, else in ``y``."""
    ends = [wide if wide is not None and i < len(finish) and finish[i] else y for i in range(len(sizes))]
    lengths = [prod(shape) * n for n in sizes]
    pieces = [end.split(lengths)[i] for i, end in enumerate(ends)]
    return [piece.view(*shape, n) for piece, n in zip(pieces, sizes, strict=True)]


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
    most = gpu.card(x.device).shared
    tiles = linear_tiles.choose(vectors, K, shared["SIZES"], x.element_size(), gated=gated, counters=countable, shared=most)
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
