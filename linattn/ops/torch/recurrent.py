"""Recurrent form in operations of torch: one step per token, for decoding and to check the chunk form."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from linattn.ops.inputs import Inputs, operands
from linattn.ops.torch.decay import Factor
from linattn.ops.torch.layout import shared


class Token(NamedTuple):
    """Operands of one token; None for those that the rule does not have."""

    q: Tensor  # [B, H, 1, K]
    k: Tensor  # [B, H, 1, K]
    v: Tensor  # [B, H, 1, V]
    decay: Factor | None  # [.., H, 1 or K, 1]
    beta: Tensor | None  # [B, H, 1, 1]
    read: Tensor | None  # [B, H, 1, K]
    write: Tensor | None  # [B, H, 1, K]
    bonus: Tensor | None  # [H, 1, K]


def causal(inputs: Inputs, v: Tensor, initial: Tensor) -> tuple[Tensor, Tensor]:
    """Run ``v`` [B, T, H, V] token by token from the state [B, H, K, V]; returns the outputs and the final states."""
    cu = inputs.cu_seqlens
    walk = _rows(inputs, v, initial) if cu is None else _packed(inputs, cu, v, initial)
    outputs, final = [], initial
    for o, state in walk:
        outputs.append(o)  # [B, H, 1, V]
        final = state
    return torch.cat(outputs, -2).transpose(1, 2), final


def _rows(inputs: Inputs, v: Tensor, state: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Run sequences that are rows of the batch."""
    for token in _tokens(inputs, v):
        o, state = _step(state, token)
        yield o, state


def _packed(inputs: Inputs, cu: Tensor, v: Tensor, initial: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Run packed sequences in one row: each starts from its own state and leaves its final state."""
    cu, count = cu.long(), v.shape[1]
    row = torch.searchsorted(cu[1:].contiguous(), torch.arange(count, device=cu.device), right=True)
    rows = torch.arange(inputs.rows, device=cu.device)
    token = torch.arange(count, device=cu.device)
    starts = (token == cu[row])[:, None, None, None].unbind()
    ends = ((token[:, None] == cu[row + 1][:, None] - 1) & (row[:, None] == rows))[..., None, None, None].unbind()  # [N, 1, 1, 1]
    state, final = initial[:1], initial
    for each, start, end, own in zip(_tokens(inputs, v), starts, ends, initial.index_select(0, row).unbind(), strict=True):
        o, state = _step(torch.where(start, own, state), each)
        final = torch.where(end, state, final)
        yield o, final


def _tokens(inputs: Inputs, v: Tensor) -> Iterator[Token]:
    count = v.shape[1]

    def tokens(x: Tensor | None) -> tuple[Tensor | None, ...]:
        return (None,) * count if x is None else x.to(v.dtype).unbind(1)

    def rows(x: Tensor | None) -> tuple[Tensor | None, ...]:
        return tokens(None if x is None else x[..., None, :])

    q, k = (shared(x, inputs.heads) for x in (inputs.q, inputs.k))
    q = q.to(v.dtype) * inputs.scale
    beta, read, write, bonus = operands(inputs.rule)
    bonus = None if bonus is None else bonus.to(v.dtype)[:, None]
    beta = None if beta is None else beta[..., None]
    timed = rows(q), rows(k), rows(v), _factors(inputs, v), rows(beta), rows(read), rows(write)
    return iter([Token(*each) for each in zip(*timed, (bonus,) * count, strict=True)])  # torch 2.11 compiles no starmap


def _factors(inputs: Inputs, v: Tensor) -> tuple[Factor | None, ...]:
    count = v.shape[1]
    if inputs.decay is None:
        return (None,) * count
    log = inputs.decay.to(v.dtype)
    factor = Factor.of(log[..., None] if inputs.decay_per_channel else log[..., None, None])
    return (factor,) * count if inputs.decay_constant else tuple(map(Factor, *(f.unbind(1) for f in factor)))


def _step(s: Tensor, token: Token) -> tuple[Tensor, Tensor]:
    """Compute one token: the output [B, H, 1, V] and the next state [B, H, K, V]."""
    q, k, v, decay, beta, read, write, bonus = token

    def faded(written: Tensor) -> Tensor:
        return s + written if decay is None else decay.apply(s, written)

    if bonus is not None:
        return q @ s + (q * bonus * k).sum(-1, keepdim=True) * v, faded(k.mT * v)
    if beta is not None:
        old = faded(torch.zeros_like(s)) if decay is not None else s
        s = old + k.mT * (beta * (v - k @ old))
    else:
        s = faded(k.mT * v if read is None or write is None else torch.addcmul(k.mT * v, write.mT, read @ s))
    return q @ s, s
