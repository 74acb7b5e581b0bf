"""Prefill: reads tokens into a state, a segment at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from linattn.arguments import described
from linattn.ops.checks import check_mask, packed_lengths, tensor

if TYPE_CHECKING:
    from linattn.models import Backbone
    from linattn.state import State

PREFILL = 4096  # tokens of a segment: a longer prompt takes no more memory


@torch.no_grad()
def prefill(
    model: Backbone, ids: Tensor, state: State | None = None, *, mask: Tensor | None = None, cu_seqlens: Tensor | None = None
) -> tuple[Tensor, State]:
    """Read ``ids`` [B, T], T at least 1; returns the hidden states [B, t, D] of the last segment and the state after it.

    ``state`` is the state after earlier tokens, ``mask`` [B, T] bool marks real tokens, and with ``cu_seqlens`` [N + 1] B is 1 and N
    sequences lie end to end.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model must be a backbone, as the model of a linattn.LanguageModel is, but came as {described(model)}")
    if tensor("ids", ids).ndim != 2 or not ids.shape[1]:
        raise ValueError(f"ids must have shape [B, T] with T of at least 1, but came with {list(ids.shape)}")
    if mask is not None:
        check_mask("mask", mask, ids)
    if cu_seqlens is not None:
        packed_lengths(cu_seqlens, ids)
    for start in range(0, ids.shape[1], PREFILL):
        piece = ids[:, start : start + PREFILL]
        end = start + piece.shape[1]
        own = None if cu_seqlens is None else cu_seqlens.clamp(start, end) - start  # a sequence that lies elsewhere is empty here
        hidden, state = model(piece, state, return_state=True, mask=None if mask is None else mask[:, start:end], cu_seqlens=own)
    assert state is not None
    return hidden, state
