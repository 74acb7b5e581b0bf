"""Triton's interpreter, mended for the NumPy of the lock and for Triton 3.9: importing this before a kernel runs is enough."""

from __future__ import annotations

from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

_patch = interpreter._patch_lang_tensor


def _patch_lang_tensor(tensor, scope):
    """A bound of a loop is an array of one element, which NumPy 2.4 no longer takes for an index."""
    _patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


def _masked(memory_access, place: int):
    """``memory_access`` with its mask as booleans: spread over a block, those of a scalar are integers, which 3.9 refuses."""

    def mended(self, *arguments):
        mask = arguments[place]
        return memory_access(self, *arguments[:place], TensorHandle(mask.data.astype(bool), mask.dtype), *arguments[place + 1 :])

    return mended


interpreter._patch_lang_tensor = _patch_lang_tensor
InterpreterBuilder.create_masked_load = _masked(InterpreterBuilder.create_masked_load, 1)
InterpreterBuilder.create_masked_store = _masked(InterpreterBuilder.create_masked_store, 2)
