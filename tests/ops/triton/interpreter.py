"""Triton's interpreter, mended for the NumPy of the lock: importing this before a kernel runs is enough."""

from __future__ import annotations

from triton.runtime import interpreter

_patch = interpreter._patch_lang_tensor


def _patch_lang_tensor(tensor, scope):
    """A bound of a loop is an array of one element, which NumPy 2.4 no longer takes for an index."""
    _patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


interpreter._patch_lang_tensor = _patch_lang_tensor
