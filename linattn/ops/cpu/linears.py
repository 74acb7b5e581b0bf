"""Linear maps of a few vectors at memory bandwidth, twice as fast as torch's product of 16-bit numbers."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from linattn.ops import tracing
from linattn.ops.cpu import library
from linattn.ops.memory import dense
from linattn.ops.torch.linears import FINISHES, Biases, Finish, Matrix, Norm, Steps
from linattn.ops.torch.quantised import Quantised

VECTORS, MAPS = 8, 8  # limits of linears.cpp
FIELDS = 10  # of a map in Call
_struct = struct.Struct("7q 2d 4q" + FIELDS * MAPS * "q")  # Call of linears.cpp
_step = struct.Struct("2q d")  # Step of finish.h
_NUMBERS = {name: i for i, name in enumerate(FINISHES)}  # numbered as in finish.h


def refusal(x: Tensor, *weights: Matrix) -> str | None:
    """Reason why :func:`linears` does not run the call, or None if it does."""
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
        return "tracing is active, which needs PyTorch operations"
    return library.refusal(x, *plain)


def steps_refusal(x: Tensor, steps: Steps = ()) -> str | None:
    """Reason why the kernel does not take ``x`` through ``steps``, or None if it does."""
    tensors = [x, *[other for _, other in steps if isinstance(other, Tensor)]]
    if x.numel() == 0:
        return "there are no numbers"
    if tracing.wanted(*tensors):
        return "it has no gradients"
    if tracing.traced(*tensors):
        return "tracing is active, which needs PyTorch operations"
    return library.refusal(*tensors)


def linears(
    x: Tensor, weights: Sequence[Matrix], biases: Biases, norm: Norm | None, residual: Tensor | None, gated: bool, finish: Finish
) -> list[Tensor]:
    """Compute :func:`linattn.ops.linears.linears`; operands of one dtype but for those of steps; sums in float32, rounded once."""
    norm = Norm(None, 0.0, 0) if norm is None else norm
    weight, gate, residual, *biases = (None if t is None else dense(t) for t in (norm.weight, norm.gate, residual, *biases))
    norm = norm._replace(weight=weight, gate=gate)
    weights = [w if isinstance(w, Quantised) or (w.stride(1) == 1 and not w.is_neg()) else dense(w) for w in weights]
    y, run = bound(dense(x), weights, biases, norm, residual, gated, finish)
    run()
    return y


def bound(
    x: Tensor, weights: Sequence[Matrix], biases: Biases, norm: Norm | None, residual: Tensor | None, gated: bool, finish: Finish = ()
) -> tuple[list[Tensor], library.Bound]:
    """Bind :func:`linears` to its arguments, which are contiguous; returns empty results and a function that fills them when called."""
    each = [finish[i] if i < len(finish) else () for i in range(len(weights))]
    y = [library.empty((*x.shape[:-1], w.shape[0]), torch.float32 if s else x.dtype) for w, s in zip(weights, each, strict=True)]
    y = y[:1] if gated else y
    out, steps = [*y, *[None] * (len(weights) - len(y))], [_packed(s) for s in each]
    matrices = [_matrix(w) for w in weights]
    maps = [(m[0], b, t, *m[1:3], *s[:2], *m[3:]) for m, b, t, s in zip(matrices, biases, out, steps, strict=True)]
    return y, _bound(x, norm, residual, gated, maps, kept=(maps, steps))


def _matrix(w: Matrix) -> tuple[Tensor, int, int, int, Tensor | None, int]:
    """Entries, number of rows, distance between rows, bits, scales and group of ``w``, in the order of linears.cpp."""
    if isinstance(w, Tensor):
        return w, w.shape[0], w.stride(0), 0, None, 0
    return w.codes, w.shape[0], w.codes.shape[1], w.bits, w.scale, w.group


def bound_norm(x: Tensor, weight: Tensor | None, gate: Tensor | None, eps: float, *, mean: bool) -> tuple[Tensor, library.Bound]:
    """Bind the norm of :mod:`linattn.ops.norms` over the last axis of ``x``: see :func:`bound`."""
    y, norm = library.empty(tuple(x.shape), x.dtype), Norm(weight, eps, x.shape[-1], gate)
    x = x.flatten(-2) if weight is not None and weight.ndim == 2 else x
    only = (None, None, y, *[0] * (FIELDS - 3))  # the norm's own result, in place of a map
    return y, _bound(x, norm, None, False, [only], kept=y, count=0, mean=mean)


def bound_rows(weight: Matrix, ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, library.Bound]:
    """Bind the reading of the rows ``ids`` [...] int64 of ``weight``, all contiguous, a plain one of ``dtype``: see :func:`bound`."""
    y, (rows, columns) = library.empty((*ids.shape, weight.shape[1]), dtype), weight.shape
    codes, scale = (weight, None) if isinstance(weight, Tensor) else weight
    group = 0 if isinstance(weight, Tensor) or weight.bits == 8 else weight.group
    arguments = codes, scale, group, rows, columns, ids, ids.numel(), y, library.DTYPES[dtype]
    return y, library.Bound("embedding", library.words(*arguments), arguments)


def stepped(x: Tensor, steps: Steps) -> Tensor:
    """Compute :func:`linattn.ops.linears.stepped`."""
    x = x.contiguous()
    y, (address, count, _kept) = library.empty(tuple(x.shape)), _packed(steps)
    library.call("finish", x, library.DTYPES[x.dtype], y, *_sizes(x), address, count)
    return y


def _sizes(x: Tensor) -> tuple[int, int]:
    return x.numel() // x.shape[-1], x.shape[-1]


def _bound(
    x: Tensor, norm: Norm | None, residual: Tensor | None, gated: bool, maps: Sequence[tuple], *, kept: object, count: int | None = None,
    mean: bool = True,
) -> library.Bound:  # fmt: skip
    """Bind the kernel to Call of linears.cpp with the first ``count`` of ``maps``, None: all. ``kept``: objects whose memory it reads."""
    weight, eps, size, gate = Norm(None, 0.0, 0) if norm is None else norm
    share = 1 / max(size, 1) if mean else 1.0  # of the sum of squares
    numbers = [n if isinstance(n, int) else _address(n) for m in maps for n in m]
    packed = _struct.pack(
        library.DTYPES[x.dtype], *_sizes(x), len(maps) if count is None else count, gated, size, 1 if weight is None else weight.numel(),
        eps, share, *map(_address, (x, weight, gate, residual)), *numbers, *[0] * (FIELDS * MAPS - len(numbers)),
    )  # fmt: skip
    buffer = ctypes.create_string_buffer(packed, len(packed))
    return library.Bound("linears", buffer, (x, weight, gate, residual, kept))


def _packed(steps: Steps) -> tuple[int, int, object]:
    """Address of ``steps`` in the form of finish.h, their number, and the objects that hold their memory."""
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
