"""Tensors of a call of the recurrence on a GPU, its gradients, and the layouts that its kernels read."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from linattn.ops.triton.hopper import WIDEST


class Arguments(NamedTuple):
    """The tensors of one call, in the order of its operators."""

    q: Tensor  # [B, T, Hk, K]
    k: Tensor  # [B, T, Hk, K]
    v: Tensor  # [B, T, H, V]
    decay: Tensor | None  # [B, T, H] or [B, T, H, K]
    beta: Tensor | None  # [B, T, H]
    read: Tensor | None  # [B, T, H, K]
    write: Tensor | None  # [B, T, H, K]
    bonus: Tensor | None  # [H, K]
    initial: Tensor | None  # [N, H, K, V]
    cu: Tensor | None  # [N + 1]


class Gradients(NamedTuple):
    """Outputs of the last kernel of a backward pass, None for those that do not exist."""

    q: Tensor
    k: Tensor
    decay: Tensor | None
    beta: Tensor | None
    read: Tensor | None
    write: Tensor | None
    bonus: Tensor | None  # [chunks, H, K]


def side_by_side(v: Tensor) -> Tensor:
    """``v`` [B, T, H, V] with contiguous heads if they are wide, so that the parts of heads are evenly spaced."""
    return v.contiguous() if v.shape[3] > WIDEST and v.stride(2) != v.shape[3] else v


def in_rows(t: Tensor | None) -> Tensor | None:
    """``t`` [B, T, H, ...], its last dimension contiguous and its rows evenly spaced over batch and time."""
    if t is None or t.is_contiguous():
        return t
    even = t.shape[0] == 1 or t.stride(0) == t.shape[1] * t.stride(1)
    packed = t.ndim == 3 or t.shape[3] == 1 or t.stride(3) == 1
    return t if even and packed else t.contiguous()


def strides(*tensors: Tensor | None) -> list[int]:
    """Strides of time and heads, for each tensor."""
    return [s for t in tensors for s in ((0, 0) if t is None else t.stride()[1:3])]
