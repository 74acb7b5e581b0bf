"""Results that the backward pass forms again, in place of saving them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from linattn.ops import tracing

Saved = Tensor | Callable[[], Tensor]


def formed_again(t: Tensor, form: Callable[[], Tensor]) -> AbstractContextManager:
    """Context in which operations do not save ``t`` for backward, but ``form``, which returns the same bits from tensors saved anyway.

    It does nothing without gradients, under tracing, and inside other hooks of saved tensors, such as those of activation checkpointing.
    """
    if not (t.requires_grad and torch.is_grad_enabled()) or tracing.traced(t) or _hooked():
        return nullcontext()
    place, kind = (t.data_ptr(), t.numel()), t.dtype  # ``t`` itself would be kept

    def pack(saved: Tensor) -> Saved:
        if type(saved) is not Tensor or (saved.data_ptr(), saved.numel()) != place or saved.dtype != kind or not saved.is_contiguous():
            return saved
        shape = saved.shape
        return lambda: _formed(form, shape)

    return torch.autograd.graph.saved_tensors_hooks(pack, _unpacked)


def _hooked() -> bool:
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def _formed(form: Callable[[], Tensor], shape: torch.Size) -> Tensor:
    with torch.no_grad():
        return form().view(shape)


def _unpacked(saved: Saved) -> Tensor:
    return saved if isinstance(saved, Tensor) else saved()
