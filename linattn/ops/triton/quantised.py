"""Linear maps of few vectors with quantised matrices on a GPU, beside plain ones in one launch, and rows of quantised matrices.

Each lane loads the 32-bit words that match its elements of the vector, so no data moves between lanes. Products: quantised_parts.py.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from linattn.ops import gpu, tracing
from linattn.ops.memory import dense
from linattn.ops.torch.linears import Biases, Finish, Matrix, Norm, portable
from linattn.ops.torch.quantised import Quantised
from linattn.ops.triton import fitting, launch
from linattn.ops.triton import linears as plain_kernels
from linattn.ops.triton.linears_parts import _bias, _norm, _prepared, _silu, _store
from linattn.ops.triton.quantised_parts import _ended, _four, _of_heads, _place, _silus, _squares, _sums4, _sums8, _times

VECTORS = 256  # with more vectors a product with the dequantised matrix is faster
ROWS = 16  # largest number of rows of a program
BYTES = 16 << 10  # of rows of a program
THREADS = {4: 128, 8: 128, 16: 256}  # bytes of rows of a thread, by the bits of a number
PROGRAMS = 128  # about one for each multiprocessor of the largest devices
TILE = 64  # largest number of matrix rows in a tile of several vectors
NONE = Norm(None, 0.0, 0)
NAMES = {0: "PLAIN", 8: "EIGHT", 4: "FOUR"}  # constants of the kernel for the rows of a program, by the bits of a number


@triton.jit
def _words(matrix, n, in_n, w, WORDS: tl.constexpr, BW: tl.constexpr):
    """32-bit words ``w`` of the rows ``n``, which have WORDS each."""
    there = in_n[:, None] if WORDS == BW else in_n[:, None] & (w < WORDS)[None, :]
    return tl.load(matrix.to(tl.pointer_type(tl.int32), bitcast=True) + n[:, None].to(tl.int64) * WORDS + w[None, :], mask=there, other=0)


@triton.jit
def _scales(scale, n, in_n, w, K: tl.constexpr, GROUP: tl.constexpr):
    """Scales of the words ``w`` of 8 codes; the hint, false for the addresses, selects the layout of the words."""
    own = tl.max_contiguous(tl.multiple_of(w // (GROUP // 8), 1), 32)
    there = in_n[:, None] & (w < K // 8)[None, :]
    address = scale.to(tl.pointer_type(tl.float16), bitcast=True)
    return tl.load(address + n[:, None] * (K // GROUP) + own[None, :], mask=there, other=0.0)


@triton.jit
def vector_kernel(
    x, matrices, scales, biases, constants, norm, gate, residual, y, wide, eps,
    SIZES: tl.constexpr, ROWS: tl.constexpr, KINDS: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, SIZE: tl.constexpr,
    WEIGHTS: tl.constexpr, BIASED: tl.constexpr, FINISH: tl.constexpr, GATED: tl.constexpr, OVERLAPPED: tl.constexpr,
    GROUP: tl.constexpr, PLAIN: tl.constexpr, EIGHT: tl.constexpr, FOUR: tl.constexpr,
):  # fmt: skip
    """As the kernel in linears.py. Matrices and scales come as bytes; KINDS are the bits of a number, 0 for a plain matrix.

    ROWS are the rows of a program, one number for each matrix; PLAIN, EIGHT and FOUR those of each kind, 0 if there is none.
    """
    if OVERLAPPED:
        tl.extra.cuda.gdc_launch_dependents()
    index, matrix, scale, N, kind, before, first = _place(matrices, scales, tl.program_id(0), SIZES, ROWS, KINDS)
    if FOUR > 0:
        if kind == 4:
            BW: tl.constexpr = BK // 8
            n, w = first + tl.arange(0, FOUR), tl.multiple_of(tl.arange(0, BW), 1)  # a word per lane, in the vector's layout
            in_n, four = n < N, tl.arange(0, BW)
            words, each = _words(matrix, n, in_n, w, K // 8, BW), _scales(scale, n, in_n, w, K, GROUP)
            if GATED:
                others, other_each = _words(matrices[1], n, in_n, w, K // 8, BW), _scales(scales[1], n, in_n, w, K, GROUP)
            k = (four // 4 * 32 + four % 4 * 4)[:, None] + tl.arange(0, 4)[None, :]
            if norm is not None:
                low_norm, high_norm = _four(norm, k % WEIGHTS, K, BW), _four(norm, (k + 16) % WEIGHTS, K, BW)
            if OVERLAPPED:
                tl.extra.cuda.gdc_wait()
            low, high = _four(x, k, K, BW), _four(x, k + 16, K, BW)
            if gate is not None:
                low_gate, high_gate = _four(gate, k, K, BW), _four(gate, k + 16, K, BW)
            factor = 1.0
            if SIZE == K:
                factor = 1.0 / tl.sqrt_rn(tl.sum(_squares(low) + _squares(high), 0) / K + eps)
            elif SIZE > 0:
                own = _of_heads(_squares(low) + _squares(high), BW, SIZE // 8, SIZE, eps)
                low, high = _times(low, (own, own, own, own)), _times(high, (own, own, own, own))
            if norm is not None:
                low, high = _times(low, low_norm), _times(high, high_norm)
            if gate is not None:
                low, high = _times(low, _silus(low_gate)), _times(high, _silus(high_gate))
            out, other = _sums4(words, each, low, high) * factor, 0.0
            if GATED:
                other = _sums4(others, other_each, low, high) * factor
            _ended(out, other, residual, y, wide, constants, biases, index, n, in_n, before, FOUR, BIASED, FINISH, GATED)
    if EIGHT > 0:
        if kind == 8:
            BQ: tl.constexpr = BK // 4
            n, w = first + tl.arange(0, EIGHT), tl.multiple_of(tl.arange(0, BQ), 1)
            in_n, k = n < N, tl.arange(0, BQ)[:, None] * 4 + tl.arange(0, 4)[None, :]
            words = _words(matrix, n, in_n, w, K // 4, BQ)
            each = tl.load(scale.to(tl.pointer_type(tl.float32), bitcast=True) + n, mask=in_n, other=0.0)
            if GATED:
                others = _words(matrices[1], n, in_n, w, K // 4, BQ)
                other_each = tl.load(scales[1].to(tl.pointer_type(tl.float32), bitcast=True) + n, mask=in_n, other=0.0)
            if norm is not None:
                weight = _four(norm, k % WEIGHTS, K, BQ)
            if OVERLAPPED:
                tl.extra.cuda.gdc_wait()
            a = _four(x, k, K, BQ)
            if gate is not None:
                own_gate = _four(gate, k, K, BQ)
            factor = 1.0
            if SIZE == K:
                factor = 1.0 / tl.sqrt_rn(tl.sum(_squares(a), 0) / K + eps)
            elif SIZE > 0:
                own = _of_heads(_squares(a), BQ, SIZE // 4, SIZE, eps)
                a = _times(a, (own, own, own, own))
            if norm is not None:
                a = _times(a, weight)
            if gate is not None:
                a = _times(a, _silus(own_gate))
            out, other = _sums8(words, a) * each * factor, 0.0
            if GATED:
                other = _sums8(others, a) * other_each * factor
            _ended(out, other, residual, y, wide, constants, biases, index, n, in_n, before, EIGHT, BIASED, FINISH, GATED)
    if PLAIN > 0:
        if kind == 0:
            n, k = first + tl.arange(0, PLAIN), tl.arange(0, BK)
            in_n = n < N
            there = in_n[:, None] & (k < K)[None, :]
            place = n[:, None].to(tl.int64) * K + k[None, :]
            rows = tl.load(matrix.to(tl.pointer_type(x.dtype.element_ty), bitcast=True) + place, mask=there, other=0.0)
            weight = None if norm is None else _norm(norm, k, K, WEIGHTS)
            if OVERLAPPED:
                tl.extra.cuda.gdc_wait()
            a, factor = _prepared(x, weight, gate, k, K, BK, SIZE, eps)
            out = tl.sum(rows.to(tl.float32) * a[None, :], 1) * factor
            _ended(out, 0.0, residual, y, wide, constants, biases, index, n, in_n, before, PLAIN, BIASED, FINISH, False)


@triton.jit(do_not_specialize=["M"])
def tile_kernel(
    x, matrices, scales, biases, constants, residual, y, wide, M,
    SIZES: tl.constexpr, ROWS: tl.constexpr, KINDS: tl.constexpr, K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    FOUR: tl.constexpr, BIASED: tl.constexpr, FINISH: tl.constexpr, GATED: tl.constexpr, PRECISION: tl.constexpr, OVERLAPPED: tl.constexpr,
):  # fmt: skip
    """Compute the same for M vectors without a norm and matrices of one kind; each result is a dense [M, N]. BK is the group of 4 bits."""
    if OVERLAPPED:
        tl.extra.cuda.gdc_launch_dependents()
    index, matrix, scale, N, _, before, first = _place(matrices, scales, tl.program_id(1), SIZES, ROWS, KINDS)
    n, m = first + tl.arange(0, BN), tl.program_id(0) * BM + tl.arange(0, BM)
    in_n, in_m = n < N, m < M
    if OVERLAPPED:
        tl.extra.cuda.gdc_wait()
    out = tl.zeros([BM, BN], tl.float32)
    other = tl.zeros([BM, BN], tl.float32)
    for start in range(0, K, BK):
        if FOUR:
            c = tl.arange(0, BK // 2)
            k = start + c + c // 16 * 16
            low = tl.load(x + m[:, None] * K + k[None, :], mask=in_m[:, None], other=0.0)
            high = tl.load(x + m[:, None] * K + k[None, :] + 16, mask=in_m[:, None], other=0.0)
            place, group = n[None, :].to(tl.int64) * (K // 2) + (start // 2 + c)[:, None], n * (K // BK) + start // BK
            out += _product4(low, high, matrix + place, scale, group, in_n, PRECISION)
            if GATED:
                other += _product4(low, high, matrices[1] + place, scales[1], group, in_n, PRECISION)
        else:
            k = start + tl.arange(0, BK)
            a = tl.load(x + m[:, None] * K + k[None, :], mask=in_m[:, None] & (k < K)[None, :], other=0.0)
            place, there = n[None, :].to(tl.int64) * K + k[:, None], in_n[None, :] & (k < K)[:, None]
            out = tl.dot(a, _signed8(matrix + place, there).to(a.dtype), out, input_precision=PRECISION)
            if GATED:
                other = tl.dot(a, _signed8(matrices[1] + place, there).to(a.dtype), other, input_precision=PRECISION)
    if not FOUR:
        out *= tl.load(scale.to(tl.pointer_type(tl.float32), bitcast=True) + n, mask=in_n, other=0.0)[None, :]
        if GATED:
            other *= tl.load(scales[1].to(tl.pointer_type(tl.float32), bitcast=True) + n, mask=in_n, other=0.0)[None, :]
    out += _bias(biases, index, n, in_n, BN, BIASED)[None, :]
    if GATED:
        out = _silu(out) * (other + _bias(biases, 1, n, in_n, BN, BIASED)[None, :])
    place, there = m[:, None] * N + n[None, :], in_m[:, None] & in_n[None, :]
    if residual is not None:
        out += tl.load(residual + place, mask=there, other=0.0).to(tl.float32)
    _store(y, wide, before * M + place, there, out, constants, index, n, in_n, FINISH)


@triton.jit
def _product4(low, high, place, scale, group, in_n, PRECISION: tl.constexpr):
    """Product with one group of 4-bit rows: integer codes, multiplied by the scales."""
    codes = tl.load(place, mask=in_n[None, :], other=0).to(tl.int32)
    part = tl.dot(low, ((codes & 15) - 8).to(low.dtype), input_precision=PRECISION)
    part = tl.dot(high, ((codes >> 4) - 8).to(low.dtype), part, input_precision=PRECISION)
    return part * tl.load(scale.to(tl.pointer_type(tl.float16), bitcast=True) + group, mask=in_n, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _signed8(place, there):
    return tl.load(place.to(tl.pointer_type(tl.int8), bitcast=True), mask=there, other=0)


@triton.jit
def rows_kernel(codes, scale, ids, y, K: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, FOUR: tl.constexpr):
    """Row ``ids[i]`` of a quantised matrix, as floats; a program has BK numbers of one."""
    row = tl.load(ids + tl.program_id(0)).to(tl.int64)
    k = tl.program_id(1) * BK + tl.arange(0, BK)
    there = k < K
    if FOUR:
        code = tl.load(codes + row * (K // 2) + k // 32 * 16 + k % 16, mask=there, other=0).to(tl.int32)
        number = ((code >> (k % 32 // 16 * 4)) & 15) - 8
    else:
        number = tl.load(codes + row * K + k, mask=there, other=0)
    each = tl.load(scale + row * (K // GROUP) + k // GROUP, mask=there, other=0.0).to(tl.float32)
    tl.store(y + tl.program_id(0) * K + k, (number.to(tl.float32) * each).to(y.dtype.element_ty), mask=there)


def refusal(x: Tensor, *weights: Matrix) -> str | None:
    """Reason why :func:`linears` does not run the call, or None if it does."""
    plain, codes = [w for w in weights if isinstance(w, Tensor)], [w for w in weights if isinstance(w, Quantised)]
    if (plain or not codes) and (reason := plain_kernels.refusal(x, *plain)) is not None:
        return reason
    if not codes:
        return None
    if x.dtype == torch.float64:
        return "x must have at most 32 bits"
    if not 0 < x.numel() <= VECTORS * x.shape[-1] or x.shape[-1] > plain_kernels.LARGEST:
        return f"it takes at most {VECTORS} vectors of {plain_kernels.LARGEST} numbers, but x has shape {list(x.shape)}"
    if len(weights) > plain_kernels.MAPS:
        return f"it takes at most {plain_kernels.MAPS} matrices, and {len(weights)} came"
    if any(t.device != x.device or not t.is_contiguous() for w in codes for t in w):
        return "codes and scales must be contiguous and on the device of x"
    if len({w.group for w in codes if w.bits == 4}) > 1:
        return "all matrices of 4 bits must have one group"
    if tracing.traced(x, *plain):
        return "tracing is active, which needs PyTorch operations"
    return fitting.refusal(_name(x, weights))


def _name(x: Tensor, weights: Sequence[Matrix], *_: object) -> Hashable:
    return fitting.alike("quantised", *(t for w in weights for t in _parts(w))), x.shape[-1], x.numel() == x.shape[-1]


def _parts(w: Matrix) -> tuple[Tensor, ...]:
    return (w,) if isinstance(w, Tensor) else tuple(w)


def _portable(*arguments: Any) -> list[Tensor]:
    return portable(*(*arguments, ())[:7])


def linears(x: Tensor, weights: Sequence[Matrix], *arguments: Any) -> list[Tensor]:
    """Compute :func:`linattn.ops.linears.linears`, summed in float32 and rounded once."""
    plain = [w for w in weights if isinstance(w, Tensor)]
    if len(plain) == len(weights):
        return plain_kernels.linears(x, plain, *arguments)
    return _quantised(x, weights, *arguments)


@fitting.or_else(_portable, _name)
def _quantised(
    x: Tensor, weights: Sequence[Matrix], biases: Biases, norm: Norm | None, residual: Tensor | None, gated: bool,
    finish: Finish = (), counters: Tensor | None = None,
) -> list[Tensor]:  # fmt: skip
    kinds = [_bits(w) for w in weights]
    if gated and kinds[0] != kinds[1]:
        a, b = _quantised(x, weights, biases, norm, None, False, (), counters)
        return [F.silu(a) * b]
    weight, gate, residual, *biases = (None if t is None else dense(t) for t in (*(norm or NONE)[::3], residual, *biases))
    x, norm = dense(x), Norm(weight, *(norm or NONE)[1:3], gate)
    vectors, K, overlapped = x.numel() // x.shape[-1], x.shape[-1], gpu.capability(x.device) >= (9, 0)
    if norm.size and (vectors > 1 or (norm.size != K and (norm.size & (norm.size - 1) or norm.size < 32))):
        with launch.on_device(x.device):
            x, norm = plain_kernels.normed(x, norm, overlapped), NONE
    if vectors == 1:
        return _launched(x, weights, kinds, biases, norm, residual, gated, finish, overlapped)
    found: dict[int, Tensor] = {}
    for kind in sorted(set(kinds)):
        own = [i for i, other in enumerate(kinds) if other == kind]
        matrices, own_biases = [weights[i] for i in own], [biases[i] for i in own]
        steps = [finish[i] if i < len(finish) else () for i in own]
        if kind:
            some = _launched(x, matrices, [kind] * len(own), own_biases, norm, residual, gated, steps, overlapped)
        else:
            plain = [w for w in matrices if isinstance(w, Tensor)]
            some = plain_kernels.linears(x, plain, own_biases, None, residual, gated, steps, counters)
        found |= dict(zip(own, some, strict=False))
    return [found[i] for i in sorted(found)]


def _bits(w: Matrix) -> int:
    return 0 if isinstance(w, Tensor) else w.bits


def _launched(
    x: Tensor, weights: Sequence[Matrix], kinds: Sequence[int], biases: Biases, norm: Norm, residual: Tensor | None, gated: bool,
    finish: Finish, overlapped: bool,
) -> list[Tensor]:  # fmt: skip
    vectors, K = x.numel() // x.shape[-1], x.shape[-1]
    sizes = tuple(w.shape[0] for w in weights[: 1 if gated else None])
    steps, constants = plain_kernels.numbered(finish)
    y = torch.empty(vectors * sum(sizes), dtype=x.dtype, device=x.device)
    wide = torch.empty(y.shape, dtype=torch.float32, device=x.device) if steps else None
    matrices = tuple((dense(w) if isinstance(w, Tensor) else w.codes).view(torch.uint8) for w in weights)
    scales = tuple(m if isinstance(w, Tensor) else w.scale.view(torch.uint8) for m, w in zip(matrices, weights, strict=True))
    addresses = tuple(matrices[0] if b is None else b for b in biases)
    tensors = (x, matrices, scales, addresses, constants or (x,))
    group = next((w.group for w in weights if isinstance(w, Quantised) and w.bits == 4), 32)
    shared = launch.FUSED | {"SIZES": sizes, "KINDS": tuple(kinds[: len(sizes)]), "K": K, "FINISH": steps, "GATED": gated}
    shared |= {"BIASED": tuple(b is not None for b in biases), "OVERLAPPED": overlapped} | ({"launch_pdl": True} if overlapped else {})
    with launch.on_device(x.device):
        if vectors == 1:
            _of_vector((*tensors, norm.weight, norm.gate, residual, y, wide), norm, GROUP=group, **shared)
        else:
            _of_tiles((*tensors, residual, y, wide), vectors, group, **shared)
    return plain_kernels.results(y, wide, finish, sizes, x.shape[:-1])


def _of_vector(tensors: tuple, norm: Norm, **shared: Any) -> None:
    x, kinds, sizes, K = tensors[0], shared["KINDS"], shared["SIZES"], shared["K"]
    BK, matrices = triton.next_power_of_2(K), 2 if shared["GATED"] else 1
    each = {kind: BK * (kind or 8 * x.element_size()) // 8 * matrices for kind in set(kinds)}  # bytes of a row
    rows = {kind: max(min(BYTES // size, ROWS // matrices), 1) for kind, size in each.items()}

    def grid() -> int:
        return sum(triton.cdiv(n, rows[kind]) for n, kind in zip(sizes, kinds, strict=True))

    while max(rows.values()) > 1 and grid() < PROGRAMS:
        rows = {kind: max(n // 2, 1) for kind, n in rows.items()}
    warps = max(rows[kind] * size // (32 * THREADS[kind or 16]) for kind, size in each.items())
    constants = {
        "BK": BK, "SIZE": norm.size, "WEIGHTS": 1 if norm.weight is None else norm.weight.numel(), "num_warps": min(max(warps, 1), 8),
        "ROWS": tuple(rows[kind] for kind in kinds), **{name: rows.get(kind, 0) for kind, name in NAMES.items()}, **shared,
    }  # fmt: skip
    fitting.launch(vector_kernel, (grid(), 1, 1), (*tensors, norm.eps), constants)


def _of_tiles(tensors: tuple, vectors: int, group: int, **shared: Any) -> None:
    x, sizes, four = tensors[0], shared["SIZES"], shared["KINDS"][0] == 4
    BM, BN = min(max(triton.next_power_of_2(vectors), 16), 64), TILE
    while BN > 16 and triton.cdiv(vectors, BM) * sum(triton.cdiv(n, BN) for n in sizes) < PROGRAMS:
        BN //= 2
    constants = {
        "BM": BM, "BN": BN, "BK": group if four else 128 if x.element_size() < 4 else 32, "FOUR": four, "ROWS": (BN,) * len(sizes),
        "PRECISION": "ieee" if x.dtype == torch.float32 else "tf32", "num_warps": 4, "num_stages": 4, **shared,
    }  # fmt: skip
    grid = triton.cdiv(vectors, BM), sum(triton.cdiv(n, BN) for n in sizes), 1
    fitting.launch(tile_kernel, grid, (*tensors, vectors), constants)


def rows(weight: Quantised, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows ``ids`` [...] of ``weight``, [..., K] in ``dtype``."""
    K = weight.shape[1]
    y = torch.empty((*ids.shape, K), dtype=dtype, device=ids.device)
    BK = min(triton.next_power_of_2(K), 1024)
    constants = {"K": K, "BK": BK, "GROUP": weight.group, "FOUR": weight.bits == 4}
    with launch.on_device(ids.device):
        fitting.launch(rows_kernel, (ids.numel(), triton.cdiv(K, BK), 1), (*weight, ids.contiguous(), y), constants)
    return y
