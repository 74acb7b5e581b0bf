"""Linear maps of a few vectors: matrices are read at the speed of memory, which torch's product of 16 bit numbers leaves half unused."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from linattn.ops import tracing
from linattn.ops.cpu import library
from linattn.ops.memory import dense
from linattn.ops.torch.linears import FINISHES, Finish, Matrix, Steps
from linattn.ops.torch.quantised import Quantised

VECTORS, MAPS = 8, 8  # at most, as linears.cpp has room for
FIELDS = 10  # of a map
_struct = struct.Struct("7q 2d 4q" + FIELDS * MAPS * "q")  # Call of linears.cpp
_step = struct.Struct("2q d")  # Step of finish.h
_NUMBERS = {name: i for i, name in enumerate(FINISHES)}  # as it counts them


def refusal(x: Tensor, *weights: Matrix) -> str | None:
    """Reason why :func:`linears` does not take them, or None if it does."""
    if not 0 < x.numel() <= VECTORS * x.shape[-1]:
        return f"for more than {VECTORS} vectors a matrix product is faster, and x has shape {list(x.shape)}"
    if len(weights) > MAPS:
        return f"it takes {MAPS} matrices at once, and {len(weights)} came"
    plain, codes = [w for w in weights if isinstance(w, Tensor)], [w for w in weights if isinstance(w, Quantised)]
    if any(x.dtype != w.dtype for w in plain):
        return f"all must have one dtype, but x is {x.dtype} and the weights are {', '.join(str(w.dtype) for w in plain)}"
    if any(t.device != x.device or not t.is_contiguous() for w in codes for t in w):
        return "codes and scales must be contiguous and on the device of x"
    if tracing.wanted(x, *plain):
        return "it has no gradients"
    if tracing.traced(x, *plain):
        return "it is no operator that a compiler could see"
    return library.refusal(x, *plain)


def steps_refusal(x: Tensor, steps: Steps = ()) -> str | None:
    """Reason why the kernel does not take ``x`` through ``steps``, or None if it does."""
    tensors = [x, *[other for _, other in steps if isinstance(other, Tensor)]]
    if x.numel() == 0:
        return "there are no numbers"
    if tracing.wanted(*tensors):
        return "it has no gradients"
    if tracing.traced(*tensors):
        return "it is no operator that a compiler could see"
    return library.refusal(*tensors)


def linears(
    x: Tensor, weights: Sequence[Matrix], biases: Sequence[Tensor | None], norm: Tensor | None, eps: float, size: int,
    gate: Tensor | None, residual: Tensor | None, gated: bool, finish: Finish,
) -> list[Tensor]:  # fmt: skip
    """Compute :func:`linattn.ops.linears.linears`; all but the steps of one dtype, summed in float32 and rounded once."""
    norm, gate, residual, *biases = (None if t is None else dense(t) for t in (norm, gate, residual, *biases))
    weights = [w if isinstance(w, Quantised) or (w.stride(1) == 1 and not w.is_neg()) else dense(w) for w in weights]
    y, run = bound(dense(x), weights, biases, norm, eps, size, gate, residual, gated, finish)
    run()
    return y


def bound(
    x: Tensor, weights: Sequence[Matrix], biases: Sequence[Tensor | None], norm: Tensor | None, eps: float, size: int,
    gate: Tensor | None, residual: Tensor | None, gated: bool, finish: Finish = (),
) -> tuple[list[Tensor], Callable[[], None]]:  # fmt: skip
    """The results, still empty, and what fills them from what the arguments, which are contiguous, hold when it is called."""
    each = [finish[i] if i < len(finish) else () for i in range(len(weights))]
    y = [library.empty((*x.shape[:-1], w.shape[0]), torch.float32 if s else x.dtype) for w, s in zip(weights, each, strict=True)]
    y = y[:1] if gated else y
    out, steps = [*y, *[None] * (len(weights) - len(y))], [_packed(s) for s in each]
    matrices = [_matrix(w) for w in weights]
    maps = [(m[0], b, t, *m[1:3], *s[:2], *m[3:]) for m, b, t, s in zip(matrices, biases, out, steps, strict=True)]
    return y, _bound(x, norm, eps, size, 1 / max(size, 1), gate, residual, gated, maps, (maps, steps))


def _matrix(w: Matrix) -> tuple[Tensor, int, int, int, Tensor | None, int]:
    """Numbers, rows, distance from row to row, bits, scales and group of ``w`` as linears.cpp has them."""
    if isinstance(w, Tensor):
        return w, w.shape[0], w.stride(0), 0, None, 0
    return w.codes, w.shape[0], w.codes.shape[1], w.bits, w.scale, w.group


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
        [(None, None, y, *[0] * (FIELDS - 3))],
        y,
        given=0,
    )


def bound_steps(x: Tensor, steps: Steps) -> tuple[Tensor, Callable[[], None]]:
    """``x`` [..., N], which is contiguous, after ``steps``, likewise; float32."""
    y, packed = library.empty(tuple(x.shape)), _packed(steps)
    return y, library.bound("finish", x, library.DTYPES[x.dtype], y, *_sizes(x), *packed[:2], keep=packed)


def bound_rows(weight: Quantised, ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Callable[[], None]]:
    """Rows ``ids`` [...] of ``weight``, all contiguous, likewise; ids int64 of the matrix."""
    y, (rows, columns) = library.empty((*ids.shape, weight.shape[1]), dtype), weight.shape
    group = 0 if weight.bits == 8 else weight.group
    numbers = group, rows, columns, ids, ids.numel(), y, library.DTYPES[dtype]
    return y, library.bound("quantised_rows", *weight, *numbers)


def stepped(x: Tensor, steps: Steps) -> Tensor:
    """Compute :func:`linattn.ops.linears.stepped`."""
    x = x.contiguous()
    y, (address, count, _kept) = library.empty(tuple(x.shape)), _packed(steps)
    library.call("finish", x, library.DTYPES[x.dtype], y, *_sizes(x), address, count)
    return y


def _sizes(x: Tensor) -> tuple[int, int]:
    return x.numel() // x.shape[-1], x.shape[-1]


def _bound(x, norm, eps, size, share, gate, residual, gated, maps, kept, given: int | None = None) -> Callable[[], None]:
    numbers = [n if isinstance(n, int) else _address(n) for m in maps for n in m]
    packed = _struct.pack(
        library.DTYPES[x.dtype], *_sizes(x), len(maps) if given is None else given, gated, size, 1 if norm is None else norm.numel(), eps,
        share, *map(_address, (x, norm, gate, residual)), *numbers, *[0] * (FIELDS * MAPS - len(numbers)),
    )  # fmt: skip
    buffer = ctypes.create_string_buffer(packed, len(packed))
    return library.bound("linears", ctypes.addressof(buffer), keep=(buffer, x, norm, gate, residual, kept))


def _packed(steps: Steps) -> tuple[int, int, object]:
    """The address of ``steps`` as finish.h has them, how many there are, and what has to live as long."""
    if not steps:
        return 0, 0, None
    others = [library.plain(other) if isinstance(other, Tensor) else other for _, other in steps]
    packed = b"".join(
        _step.pack(_NUMBERS[name], _address(other), 0.0) if isinstance(other, Tensor) else _step.pack(_NUMBERS[name], 0, other or 0.0)
        for (name, _), other in zip(steps, others, strict=True)
    )
    buffer = ctypes.create_string_buffer(packed, len(packed))
    return ctypes.addressof(buffer), len(steps), (buffer, others)


def _address(t: Tensor | None) -> int:
    return 0 if t is None else t.data_ptr()
