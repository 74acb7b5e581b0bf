"""Small operations of a decoding step: elementwise ones, and sums and norms of rows, of which one call runs many in order."""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from linattn.ops.cpu import library

aten = torch.ops.aten
FEW = 1 << 13  # elements above which several threads pay off
_NAMES = (
    "copy", "add", "sub", "mul", "div", "clamp_min", "neg", "exp", "log_sigmoid", "relu", "sigmoid", "silu", "softplus", "square", "tanh",
    "lerp", "sum", "length", "layer_norm",
)  # fmt: skip
_NUMBERS = {name: i for i, name in enumerate(_NAMES)}  # as in small_operations.cpp
_ELEMENTWISE: dict[Any, str] = {
    aten.add.Tensor: "add", aten.sub.Tensor: "sub", aten.mul.Tensor: "mul", aten.div.Tensor: "div", aten.clamp_min.default: "clamp_min",
    aten.neg.default: "neg", aten.exp.default: "exp", aten.log_sigmoid.default: "log_sigmoid", aten.relu.default: "relu",
    aten.sigmoid.default: "sigmoid", aten.silu.default: "silu", aten.softplus.default: "softplus", aten.square.default: "square",
    aten.tanh.default: "tanh", aten.lerp.Tensor: "lerp", aten.lerp.Scalar: "lerp",
}  # fmt: skip
_OPERANDS = {"add": 2, "sub": 2, "mul": 2, "div": 2, "clamp_min": 2, "lerp": 3}  # others have one
_COPIES = (aten.to.dtype, aten._to_copy.default, aten.clone.default, aten.contiguous.default)
_operation = struct.Struct("3q d" + 4 * "4q d")  # Operation of small_operations.cpp
_NOTHING = (0, 0, 0, 0, 0.0)
Given = Tensor | float


class Small(NamedTuple):
    """Operations in the form of small_operations.cpp, and the tensors whose memory they use."""

    packed: bytes
    kept: tuple[Any, ...]

    def bound(self) -> library.Bound:
        """Function that runs them."""
        buffer = ctypes.create_string_buffer(self.packed, len(self.packed))
        arguments = library.words(ctypes.addressof(buffer), len(self.packed) // _operation.size)
        return library.Bound("small_operations", arguments, (buffer, self.kept))


def joined(parts: Sequence[Small]) -> Small:
    """Operations of ``parts`` one after another."""
    return Small(b"".join(part.packed for part in parts), tuple(part.kept for part in parts))


def small(target: Any, args: tuple, kwargs: dict[str, Any], value: Any) -> Small | None:
    """Operation that computes ``target(*args, **kwargs)`` into the buffer ``value``; None if it is not supported.

    Numbers are computed in float32 and rounded once to the dtype of ``value``, as by torch.
    """
    if not isinstance(value, Tensor) or not 0 < value.numel() <= FEW:
        return None
    if target is aten.cat.default:
        return _cat(*args, value=value)
    if target in _COPIES:
        return copy(value, args[0])
    name = _ELEMENTWISE.get(target)
    if name is not None and not kwargs and len(args) == _OPERANDS.get(name, 1):
        return _elementwise(name, value, args)
    if target is aten.sum.dim_IntList and not kwargs and args[1] in ([-1], [args[0].ndim - 1]):
        return _of_rows("sum", value, args[0])
    if target is aten.linalg_vector_norm.default and not kwargs and len(args) >= 3 and args[1] == 2 and args[2] == [-1]:
        return _of_rows("length", value, args[0])
    if target is aten.layer_norm.default and len(args[1]) == 1 and not kwargs:
        return _layer_norm(value, *args)
    return None


def copy(to: Tensor, x: Tensor) -> Small | None:
    """Operation that copies ``x`` into ``to``, tensors of one shape."""
    return _elementwise("copy", to, (x,))


def _elementwise(name: str, to: Tensor, given: Sequence[Given]) -> Small | None:
    tensors = [x.expand(to.shape) for x in given if isinstance(x, Tensor)]
    if not tensors or not _fits(to, *tensors):
        return None
    places = _as_matrices(to, *tensors)
    if places is None:
        return None
    rows, columns, (of_to, *strides) = places
    rest = iter(zip(tensors, strides, strict=True))
    operands = [_operand(*next(rest)) if isinstance(x, Tensor) else (0, 0, 0, 0, float(x)) for x in given]
    return _packed(name, rows, columns, 0.0, to, of_to, operands, tensors)


def _of_rows(name: str, to: Tensor, x: Tensor) -> Small | None:
    size = x.shape[-1]
    if not _fits(to, x) or not to.is_contiguous() or not x.is_contiguous() or x.numel() != to.numel() * size:
        return None
    return _packed(name, to.numel(), size, 0.0, to, (1, 0), [_operand(x, (size, 1))], [x])


def _layer_norm(
    to: Tensor, x: Tensor, shape: list[int], weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5, *_: Any
) -> Small | None:
    (size,), given = shape, [t for t in (x, weight, bias) if t is not None]
    if not _fits(to, *given) or not all(t.is_contiguous() for t in (to, *given)):
        return None
    weights = [(0, 0, 0, 0, float(i)) if t is None else _operand(t, (0, 1)) for i, t in ((1, weight), (0, bias))]
    return _packed("layer_norm", x.numel() // size, size, eps, to, (size, 1), [_operand(x, (size, 1)), *weights], given)


def _cat(tensors: Sequence[Tensor], dim: int = 0, *, value: Tensor) -> Small | None:
    if any(t.ndim != value.ndim for t in tensors):
        return None
    parts = [copy(to, x) for to, x in zip(value.split([x.shape[dim] for x in tensors], dim), tensors, strict=True) if x.numel()]
    return joined([part for part in parts if part is not None]) if parts and None not in parts else None


def _fits(*tensors: Tensor) -> bool:
    return all(t.dtype in library.DTYPES and not t.is_neg() and t.numel() <= FEW for t in tensors) and library.refusal(*tensors) is None


def _as_matrices(*tensors: Tensor) -> tuple[int, int, list[tuple[int, int]]] | None:
    """Rows, columns and strides of ``tensors``, of one shape, as matrices; None unless columns are contiguous or a single number."""
    axes: list[tuple[int, list[int]]] = []
    for i, n in enumerate(tensors[0].shape):
        strides = [t.stride(i) for t in tensors]
        if n == 1:
            continue
        if axes and all(outer == n * inner for outer, inner in zip(axes[-1][1], strides, strict=True)):
            axes[-1] = axes[-1][0] * n, strides
        else:
            axes.append((n, strides))
    axes = [(1, [0] * len(tensors))] * (2 - len(axes)) + axes
    if len(axes) > 2 or math.prod(n for n, _ in axes) == 0:
        return None
    (rows, of_rows), (columns, of_columns) = axes
    if columns > 1 and (of_columns[0] != 1 or any(stride not in (0, 1) for stride in of_columns)):
        return None
    return rows, columns, list(zip(of_rows, of_columns, strict=True))


def _operand(t: Tensor, strides: tuple[int, int]) -> tuple[float, ...]:
    return t.data_ptr(), library.DTYPES[t.dtype], *strides, 0.0


def _packed(
    name: str, rows: int, columns: int, eps: float, to: Tensor, strides: tuple[int, int], operands: Sequence[tuple], kept: Sequence[Tensor]
) -> Small:
    given = [_operand(to, strides), *operands, *[_NOTHING] * (3 - len(operands))]
    return Small(_operation.pack(_NUMBERS[name], rows, columns, eps, *(n for one in given for n in one)), (to, *kept))
