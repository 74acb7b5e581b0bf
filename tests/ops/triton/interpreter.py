"""Triton's interpreter, mended for the NumPy of the lock and for Triton 3.9, and made twice as fast.

Importing this before a kernel runs is enough.
"""

from __future__ import annotations

from dataclasses import replace

import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

_patch = interpreter._patch_lang_tensor
_patch_language = interpreter._patch_lang
_patched: set[object] = set()  # modules of the language that are patched while a kernel runs


def _patch_lang_tensor(tensor, scope):
    """A bound of a loop is an array of one element, which NumPy 2.4 no longer takes for an index."""
    _patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


def _patch_lang(fn):
    """What is patched for the kernel holds for the functions that it calls; the original patches all of it again in each call."""
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


def _masked(memory_access, place: int):
    """``memory_access`` with its mask as booleans: spread over a block, those of a scalar are integers, which 3.9 refuses."""

    def mended(self, *arguments):
        mask = arguments[place]
        return memory_access(self, *arguments[:place], TensorHandle(mask.data.astype(bool), mask.dtype), *arguments[place + 1 :])

    return mended


interpreter._patch_lang_tensor = _patch_lang_tensor
interpreter._patch_lang = _patch_lang
# Each sum of integers is computed a second time in 64 bits, which tests of a few hundred numbers have no use for.
interpreter.interpreter_builder.options = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
InterpreterBuilder.create_masked_load = _masked(InterpreterBuilder.create_masked_load, 1)
InterpreterBuilder.create_masked_store = _masked(InterpreterBuilder.create_masked_store, 2)
