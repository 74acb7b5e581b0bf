"""Prefill: reading of tokens into a state, a segment at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from linattn.arguments import described, whole
from linattn.ops.checks import check_mask, packed_lengths, tensor

if TYPE_CHECKING:
    from linattn.models import Backbone
    from linattn.state import State
    from linattn.state.store import PrefixStore

Tell = Callable[[int], object]  # called after every segment with the number of tokens read of each row

PREFILL = 4096  # tokens of a segment, which bounds the memory of long prompts


@torch.no_grad()
def prefill(
    model: Backbone, ids: Tensor, state: State | None = None, *, mask: Tensor | None = None, cu_seqlens: Tensor | None = None,
    piece: int | None = None, tell: Tell | None = None,
) -> tuple[Tensor, State]:  # fmt: skip
    """Read ``ids`` [B, T], T at least 1; returns the hidden states [B, t, D] of the last segment and the state after it.

    ``state`` is the state after earlier tokens, ``mask`` [B, T] bool marks real tokens, and with ``cu_seqlens`` [N + 1] B is 1 and N
    sequences lie end to end. ``piece`` is the number of tokens of a segment, 4,096 by default, which bounds the memory; ``tell`` is called
    with the number of tokens read so far after each.
    """
    size = PREFILL if piece is None else whole("piece", piece, 1)
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model must be a backbone, as the model of a linattn.LanguageModel is, but came as {described(model)}")
    if tensor("ids", ids).ndim != 2 or not ids.shape[1]:
        raise ValueError(f"ids must have shape [B, T] with T of at least 1, but came with {list(ids.shape)}")
    if mask is not None:
        check_mask("mask", mask, ids)
    if cu_seqlens is not None:
        packed_lengths(cu_seqlens, ids)
    for start in range(0, ids.shape[1], size):
        segment = ids[:, start : start + size]
        end = start + segment.shape[1]
        own = None if cu_seqlens is None else cu_seqlens.clamp(start, end) - start  # sequences outside of this segment are empty
        hidden, state = model(segment, state, return_state=True, mask=None if mask is None else mask[:, start:end], cu_seqlens=own)
        if tell is not None:
            tell(end)
    assert state is not None
    return hidden, state


@torch.no_grad()
def resume(
    model: Any, rows: Sequence[Sequence[int]], count: int, store: PrefixStore, *, piece: int | None = None, tell: Tell | None = None
) -> tuple[int, State | None]:
    """Read the first ``count`` tokens of each of ``rows`` from the longest prefix whose state is in ``store``.

    States are stored after every ``piece`` tokens (4,096 by default), so that an edited prompt is read from the last such place
    before the change. Returns ``count``, and the state; (0, None) for no token.
    """
    size = PREFILL if piece is None else whole("piece", piece, 1)
    done, state = store.find(model, [row[:count] for row in rows])
    if tell is not None and done:
        tell(done)
    device = model.device
    while done < count:
        end = min(count, done - done % size + size)  # at multiples, as in all prompts
        _, state = prefill(model.model, torch.tensor([row[done:end] for row in rows], device=device), state, piece=size)
        for i, row in enumerate(rows):
            store.put(model, row[:end], state.select([i]))
        done = end
        if tell is not None:
            tell(done)
    return done, state
