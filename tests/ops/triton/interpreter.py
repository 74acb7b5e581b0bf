"""Triton's interpreter, patched for the locked NumPy and Triton 3.9, with numbers of bfloat16, and several times as fast.

Importing this before a kernel runs is enough.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

_patch = interpreter._patch_lang_tensor
_patch_language = interpreter._patch_lang
_make_block_type, _make_tensor, _get_np_dtype = tl.block_type.__init__, tl.tensor.__init__, interpreter._get_np_dtype
_unwrap_any, _check_operands = tl.core._unwrap_if_constexpr, TritonSemantic.binary_op_type_checking_impl
_broadcast = TritonSemantic.broadcast_impl_value
_blocks: dict[tuple[str, tuple[int, ...]], dict[str, Any]] = {}
_tensors: dict[tuple[int, ...], dict[str, Any]] = {}
_dtypes: dict[str, np.dtype] = {}
_builtins: dict[object, list[tuple[str, Any]]] = {}
_patched: set[object] = set()  # modules of the language that are patched while a kernel runs


def _patch_builtin(package, builder, scope):
    """Look up patches of a package once; patched functions call each other without intermediate wrappers."""
    if package not in _builtins:
        members = inspect.getmembers(package, tl.core.is_builtin)
        _builtins[package] = [(name, inspect.unwrap(member)) for name, member in members]
    semantic = TritonSemantic(builder)
    for name, function in _builtins[package]:
        scope.set_attr(package, name, _with_semantic(function, semantic))


def _with_semantic(function, semantic):
    def interpreted(*arguments, **named):
        named["_semantic"] = semantic
        return function(*arguments, **named)

    return interpreted


def _patch_lang_tensor(tensor, scope):
    """Convert loop bounds, arrays of one element that NumPy 2.4 no longer accepts as an index."""
    _patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


def _patch_lang(fn):
    """Patch once per kernel, including the functions that it calls; the original patches again in each call."""
    seen = {m for m in (tl, tl.core) if any(m is value for value in fn.__globals__.values())}
    if seen and seen <= _patched:
        return interpreter._LangPatchScope()
    scope = _patch_language(fn)
    restore = scope.restore

    def restored():
        _patched.clear()
        restore()

    scope.restore = restored
    _patched.update(seen)
    return scope


def _sizes(shape: Any) -> tuple[int, ...]:
    """Sizes of a shape, which may be constexprs."""
    return tuple(size.value if isinstance(size, tl.constexpr) else size for size in shape)


def _block_type(self, element_ty: tl.dtype, shape: Any) -> None:
    """Cached block types by shape, which took most of the interpreter's time."""
    sizes = _sizes(shape)
    key = element_ty.name, sizes
    if key not in _blocks:
        _make_block_type(self, element_ty, shape)
        _blocks[key] = dict(vars(self), sizes=sizes)
    self.__dict__.update(_blocks[key])


def _tensor(self, handle: TensorHandle, type: tl.dtype) -> None:  # noqa: A002  (named so in the original)
    """A tensor with the cached constexpr shape."""
    key = type.sizes if type.is_block() else ()
    if key not in _tensors:
        _make_tensor(self, handle, type)
        _tensors[key] = {"shape": self.shape, "numel": self.numel}
    self.__dict__.update(_tensors[key], handle=handle, type=type, dtype=type.scalar)


def _numpy_dtype(dtype: tl.dtype) -> np.dtype:
    """The original builds a table of all types in each call."""
    if dtype.name not in _dtypes:
        _dtypes[dtype.name] = _get_np_dtype(dtype)
    return _dtypes[dtype.name]


def _unwrapped(value: Any) -> Any:
    """``value`` of a constant; tensors and numbers are returned unchanged."""
    return value if type(value) in _PLAIN else _unwrap_any(value)


def _operands(self, lhs, rhs, allow_lhs_ptr=False, allow_rhs_ptr=False, arithmetic_check=True, div_or_mod=False):
    """Return two tensors of equal dtype unconverted (except a quotient in half precision)."""
    if type(lhs) is type(rhs) is tl.tensor and lhs.dtype is rhs.dtype and lhs.dtype.name in _NUMBERS and not div_or_mod:
        return self.broadcast_impl_value(lhs, rhs)
    return _check_operands(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)


def _broadcast_value(self, lhs, rhs):
    """Return tensors of equal shape, and two scalars, unchanged."""
    ours, theirs = lhs.type, rhs.type
    if ours.is_block() == theirs.is_block() and (not ours.is_block() or ours.sizes == theirs.sizes):
        return lhs, rhs
    return _broadcast(self, lhs, rhs)


def _masked(memory_access, place: int):
    """``memory_access`` with a boolean mask: broadcasting a scalar's gives integers, which 3.9 refuses."""

    def mended(self, *arguments):
        mask = arguments[place]
        return memory_access(self, *arguments[:place], TensorHandle(mask.data.astype(bool), mask.dtype), *arguments[place + 1 :])

    return mended


def _is_bfloat16(x: TensorHandle) -> bool:
    return x.dtype.scalar is tl.bfloat16


def _widened(x: TensorHandle) -> np.ndarray:
    """Data of ``x``, of bfloat16 as float32. The interpreter stores bfloat16 as whole numbers, and would compute with these."""
    return (x.data.astype(np.uint32) << 16).view(np.float32) if _is_bfloat16(x) else x.data


def _rounded(data: np.ndarray) -> TensorHandle:
    """``data`` as bfloat16, rounded to nearest even; the interpreter cuts."""
    bits = np.ascontiguousarray(data, dtype=np.float32).view(np.uint32)
    nearest = (bits + np.uint32(0x7FFF) + (bits >> 16 & 1) >> 16).astype(np.uint16)
    return TensorHandle(np.where(np.isnan(data), np.uint16(0x7FC0), nearest), tl.bfloat16)


def _of_bfloat16(operation):
    """An elementwise ``operation`` of a builder that takes bfloat16 too: its operands, then the function of NumPy."""

    def mended(self, *arguments):
        *operands, function = arguments
        if not any(map(_is_bfloat16, operands)):
            return operation(self, *arguments)
        result = function(*map(_widened, operands))
        return TensorHandle(result, tl.int1) if result.dtype == bool else _rounded(result)

    return mended


def _dot(self, a, b, d, *options):
    if _is_bfloat16(a):
        return TensorHandle(np.matmul(_widened(a), _widened(b), dtype=d.data.dtype) + d.data, d.dtype.scalar)
    return _multiply(self, a, b, d, *options)


def _cast(self, x, to):
    if to.scalar is tl.bfloat16:
        return x if _is_bfloat16(x) else _rounded(x.data)
    return TensorHandle(_widened(x).astype(_numpy_dtype(to.scalar)), to.scalar) if _is_bfloat16(x) else _convert(self, x, to)


_multiply, _convert = InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl
_PLAIN = {tl.tensor, int, float, bool, str, type(None)}
_NUMBERS = {"int32", "int64", "fp16", "bf16", "fp32", "fp64"}
interpreter._patch_builtin = _patch_builtin
interpreter._patch_lang_tensor = _patch_lang_tensor
interpreter._patch_lang = _patch_lang
interpreter._get_np_dtype = _numpy_dtype
tl.block_type.__init__ = _block_type
tl.tensor.__init__ = _tensor
tl.core._unwrap_if_constexpr = _unwrapped
TritonSemantic.binary_op_type_checking_impl = _operands
TritonSemantic.broadcast_impl_value = _broadcast_value
# Skips the second computation of integer sums in 64 bits, which small tests do not need.
interpreter.interpreter_builder.options = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl = _dot, _cast
InterpreterBuilder.binary_op = _of_bfloat16(InterpreterBuilder.binary_op)
InterpreterBuilder.unary_op = _of_bfloat16(InterpreterBuilder.unary_op)
InterpreterBuilder.get_bf16 = lambda self, value: _rounded(np.array([value]))
InterpreterBuilder.create_masked_load = _masked(InterpreterBuilder.create_masked_load, 1)
InterpreterBuilder.create_masked_store = _masked(InterpreterBuilder.create_masked_store, 2)
