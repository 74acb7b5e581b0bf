"""Parts of attentions that compute their own scores: the cache, and softmax over visible tokens, a block of queries at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from linattn.mixers.context import CallContext
from linattn.mixers.parts import to_float32

PIECE = 256  # queries per block of scores


def pieces(tokens: int, size: int) -> Iterator[tuple[int, int]]:
    """Borders of blocks of at most ``size`` tokens; one empty block for no tokens."""
    for start in range(0, max(tokens, 1), size):
        yield start, min(start + size, tokens)


def cached(call: CallContext, **new: Tensor) -> tuple[dict[str, Tensor], Tensor, int]:
    """Lay out each of ``new`` [B, T, ...] with one row per sequence, after the tensors kept under its name; keeps all of them.

    Also returns a mask of usable slots, [rows, slots], and the number of slots from earlier calls. Padding behind a row's own
    tokens counts as usable: no real token comes after it. Packed sequences get T slots each.
    """
    slots, real = {}, None
    for name, x in new.items():
        own, real = call.to_rows(x)
        slots[name] = call.append(name, own)
    every = torch.ones(call.rows, call.tokens, dtype=torch.bool, device=own.device)
    old = call.get("valid")
    old = every[:, :0] if old is None else old
    call.keep("valid", torch.cat([old, every if real is None else real], 1))
    return slots, torch.cat([old, every], 1), old.shape[1]


def upto(real: Tensor, first: int, last: int) -> Tensor:
    """Visible slots before ``last`` for the queries in the slots from ``first`` to ``last``: [rows, queries, last]."""
    causal = torch.ones(last - first, last, dtype=torch.bool, device=real.device).tril(first)
    return real[:, None, :last] & causal


def fading(gates: Tensor, faded: Tensor) -> tuple[Tensor, Tensor]:
    """Accumulate the forget gates of a block, ``gates`` [rows, queries, H] as logarithms, after the slots ``faded`` [rows, slots, H].

    Returns the score bias [rows, H, queries, slots + queries] and the decay of each slot after the block
    [rows, slots + queries, H]. Gates are summed from each key on; a difference of two long sums would lose digits.
    """
    queries = gates.shape[1]
    behind = torch.ones(queries, queries, dtype=torch.bool, device=gates.device).tril(-1)
    own = torch.where(behind[..., None], gates[:, :, None], 0.0)  # [rows, queries, slots of the piece, H]
    between = torch.cat([faded[:, None] + gates.cumsum(1)[:, :, None], own.cumsum(1)], 2)
    return between.permute(0, 3, 1, 2), torch.cat([faded + gates.sum(1, keepdim=True), own.sum(1)], 1)


def weights(scores: Tensor, seen: Tensor) -> Tensor:
    """Softmax over the last axis of ``scores`` where ``seen``; 0 elsewhere, and everywhere if nothing is seen."""
    none = ~seen.any(-1, keepdim=True)
    return scores.masked_fill(~(seen | none), -torch.inf).softmax(-1).masked_fill(~seen, 0.0)


def softmax(scores: Tensor, seen: Tensor, v: Tensor) -> Tensor:
    """Weights exp(scores) [rows, H, T, slots] where ``seen`` [rows, T, slots], or [rows, H, T, slots], of v [rows, slots, H, V]:
    [rows, T, H, V].
    """
    weights = scores.masked_fill(~(seen if seen.ndim == 4 else seen[:, None]), -torch.inf).softmax(-1)
    return torch.einsum("rhts,rshv->rthv", weights, to_float32(v)).to(v.dtype)
