"""Tensors in memory as kernels read it: conjugates and negatives resolved, numbers dense.

The imaginary part of a conjugate is a view that turns the signs of another tensor: in memory its numbers have the other sign.
"""

from __future__ import annotations

from torch import Tensor


def dense(t: Tensor) -> Tensor:
    """``t`` contiguous, with its own signs in memory."""
    return t.resolve_neg().contiguous()


def turned(*tensors: Tensor | None) -> str | None:
    """Reason why a kernel that reads raw memory does not take ``tensors``, or None."""
    return "a tensor is a view that turns the signs of another" if any(t is not None and t.is_neg() for t in tensors) else None
