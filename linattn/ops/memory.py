"""Conversion of tensors to the raw memory that kernels read: dense, with conjugate and negative views resolved.

The imaginary part of a conjugate is a view whose numbers have the opposite sign in memory.
"""

from __future__ import annotations

from torch import Tensor


def dense(t: Tensor) -> Tensor:
    """Return ``t`` contiguous, with resolved signs."""
    return t.resolve_neg().contiguous()


def turned(*tensors: Tensor | None) -> str | None:
    """Reason why a kernel that reads raw memory does not take ``tensors``, or None."""
    return "a tensor is a negated view of another" if any(t is not None and t.is_neg() for t in tensors) else None
