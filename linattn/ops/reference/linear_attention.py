"""Definition of the recurrence, token by token. All other backends are tested against this file.

S_t = Diag(α_t) S_{t-1} + w_t (r_tᵀ S_{t-1}) + k_tᵀ v_t          o_t = q_t S_t
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from linattn.ops.inputs import Inputs, Outputs, operands


class Tokens(NamedTuple):
    """Inputs of each token, expanded over heads and channels: [B, T, H, K], v [B, T, H, V], beta [B, T, H, 1]."""

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor
    beta: Tensor | None
    read: Tensor | None
    write: Tensor | None


def recurrence(tokens: Tokens, bonus: Tensor | None, s: Tensor) -> tuple[Tensor, Tensor]:
    """Run the definition from the state ``s`` [B, H, K, V]; returns the outputs [B, T, H, V] and the last state."""
    outputs = [tokens.v[:, :0]]
    for t in range(tokens.v.shape[1]):
        q, k, v, decay, beta, read, write = Tokens._make(None if x is None else x[:, t] for x in tokens)
        faded = decay.exp()[..., None] * s  # [B, H, K, V]
        written = outer(k, v) if beta is None else outer(k, beta * (v - inner(k, faded)))
        if read is not None and write is not None:
            written = written + outer(write, inner(read, s))
        seen = faded + written if bonus is None else s + bonus[..., None] * outer(k, v)
        outputs.append(inner(q, seen)[:, None])
        s = faded + written
    return torch.cat(outputs, 1), s


def total(tokens: Tokens, s: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the form without causality: every query reads the same sum of all tokens."""
    s = s + torch.einsum("bthk,bthv->bhkv", tokens.k, tokens.v)
    return torch.einsum("bthk,bhkv->bthv", tokens.q, s), s


def inner(k: Tensor, s: Tensor) -> Tensor:
    return torch.einsum("bhk,bhkv->bhv", k, s)


def outer(k: Tensor, v: Tensor) -> Tensor:
    return k[..., :, None] * v[..., None, :]


def linear_attention(inputs: Inputs) -> Outputs:
    """Run the definition in the dtype of the states: float64 for float64, float32 for everything else."""
    tokens, bonus, s = widen(inputs)
    if inputs.cu_seqlens is None:
        o, s = recurrence(tokens, bonus, s) if inputs.causal else total(tokens, s)
    else:
        ends, runs = inputs.cu_seqlens.tolist(), []
        for n, (start, stop) in enumerate(zip(ends[:-1], ends[1:], strict=True)):
            one = Tokens._make(None if x is None else x[:, start:stop] for x in tokens)
            runs.append(recurrence(one, bonus, s[n : n + 1]) if inputs.causal else total(one, s[n : n + 1]))
        o, s = torch.cat([tokens.v[:, :0]] + [o for o, _ in runs], 1), torch.cat([s[:0]] + [s for _, s in runs])
    if not inputs.denominator:
        return Outputs(o, None, s, None)
    return Outputs(o[..., :-1], o[..., -1], s[..., :-1], s[..., -1])


def widen(inputs: Inputs) -> tuple[Tokens, Tensor | None, Tensor]:
    """Convert to tokens, bonus and first state in one dtype, expanded over heads and channels.

    z is an additional column of S with values of 1, so that it needs no equation.
    """
    x = Inputs(**{f.name: _cast(getattr(inputs, f.name), inputs.compute_dtype) for f in fields(inputs)})
    group = x.heads // x.k.shape[2]
    q, k, v = x.q.repeat_interleave(group, 2) * x.scale, x.k.repeat_interleave(group, 2), x.v
    s = v.new_zeros(x.rows, x.heads, k.shape[-1], v.shape[-1]) if x.initial is None else x.initial
    if x.denominator:
        z = s.new_zeros(s.shape[:-1]) if x.initial_z is None else x.initial_z
        v, s = torch.cat([v, torch.ones_like(v[..., :1])], -1), torch.cat([s, z[..., None]], -1)
    decay = v.new_zeros(x.heads) if x.decay is None else x.decay
    decay = (decay if x.decay_per_channel else decay[..., None]).expand(k.shape)
    beta, read, write, bonus = operands(x.rule)
    return Tokens(q, k, v, decay, None if beta is None else beta[..., None], read, write), bonus, s


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, tuple):  # the tensors of a rule
        return type(value)(*(_cast(v, dtype) for v in value))
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
