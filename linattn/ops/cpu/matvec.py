"""Linear maps of a few vectors: matrices are read at the speed of memory, which torch's product of 16 bit numbers leaves half unused."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence

from torch import Tensor

from linattn.ops.cpu import library

VECTORS, MAPS = 8, 8  # at most, as matvec.cpp has room for
_struct = struct.Struct("7q 2d 4q" + 5 * MAPS * "q")  # Call of matvec.cpp


def refusal(x: Tensor, *weights: Tensor) -> str | None:
    """Why :func:`linears` does not take them, or None if it does."""
    if not 0 < x.numel() <= VECTORS * x.shape[-1]:
        return f"for more than {VECTORS} vectors a matrix product is faster, and x has shape {list(x.shape)}"
    if len(weights) > MAPS:
        return f"it takes {MAPS} matrices at once, and {len(weights)} came"
    if any(x.dtype != w.dtype for w in weights):
        return f"all must have one dtype, but x is {x.dtype} and the weights are {', '.join(str(w.dtype) for w in weights)}"
    if library.wanted(x, *weights):
        return "it has no gradients"
    if library.traced(x, *weights):
        return "it is no operator that a compiler could see"
    return library.refusal(x, *weights)


def linears(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], norm: Tensor | None, eps: float, size: int,
    gate: Tensor | None, residual: Tensor | None, gated: bool,
) -> list[Tensor]:  # fmt: skip
    """As :func:`linattn.ops.linears.linears`; everything of one dtype, summed in float32 and rounded once."""
    norm, gate, residual = (None if t is None else t.contiguous() for t in (norm, gate, residual))
    weights = [w if w.stride(1) == 1 else w.contiguous() for w in weights]
    y, run = bound(x.contiguous(), weights, biases, norm, eps, size, gate, residual, gated)
    run()
    return y


def bound(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], norm: Tensor | None, eps: float, size: int,
    gate: Tensor | None, residual: Tensor | None, gated: bool,
) -> tuple[list[Tensor], Callable[[], None]]:  # fmt: skip
    """The results, still empty, and what fills them from what the arguments, which are contiguous, hold when it is called."""
    y = [library.empty((*x.shape[:-1], w.shape[0]), x.dtype) for w in weights[: 1 if gated else None]]
    out = [*y, *[None] * (len(weights) - len(y))]
    maps = [(w, b, t, w.shape[0], w.stride(0)) for w, b, t in zip(weights, biases, out, strict=True)]
    return y, _bound(x, norm, eps, size, 1 / max(size, 1), gate, residual, gated, maps)


def bound_norm(x: Tensor, weight: Tensor | None, gate: Tensor | None, eps: float, *, mean: bool) -> tuple[Tensor, Callable[[], None]]:
    """The norm over the last axis of ``x`` as :mod:`linattn.ops.norms` has it, likewise."""
    y, size = library.empty(tuple(x.shape), x.dtype), x.shape[-1]
    return y, _bound(
        x.flatten(-2) if weight is not None and weight.ndim == 2 else x,
        weight,
        eps,
        size,
        1 / size if mean else 1.0,
        gate,
        None,
        False,
        [],
        y,
    )


def _bound(x, norm, eps, size, share, gate, residual, gated, maps, normed: Tensor | None = None) -> Callable[[], None]:
    vectors = x.numel() // x.shape[-1]
    numbers = [n if isinstance(n, int) else _address(n) for m in (maps or [(None, None, normed, 0, 0)]) for n in m]
    packed = _struct.pack(
        library.DTYPES[x.dtype], vectors, x.shape[-1], len(maps), gated, size, 1 if norm is None else norm.numel(), eps, share,
        *map(_address, (x, norm, gate, residual)), *numbers, *[0] * (5 * MAPS - len(numbers)),
    )  # fmt: skip
    buffer = ctypes.create_string_buffer(packed, len(packed))
    return library.bound("linears", ctypes.addressof(buffer), keep=(buffer, x, norm, gate, residual, maps, normed))


def _address(t: Tensor | None) -> int:
    return 0 if t is None else t.data_ptr()
