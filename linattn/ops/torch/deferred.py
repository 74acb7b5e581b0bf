"""Step of the recurrence that writes its states only at every n-th call: the tokens since are kept beside them.

With the state S of some tokens ago, and the keys k_j, values u_j and decays α_j of the tokens since,

    S_t = Diag(α_1 ... α_t) S + Σ_j Diag(α_{j+1} ... α_t) k_jᵀ u_j        u_j = v_j, or β_j (v_j − k_j Diag(α_j) S_{j-1})

so that a step reads the state once, and writes one key and one value in place of the state.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from linattn.ops.inputs import Flat
from linattn.ops.torch.layout import shared


class Deferred(NamedTuple):
    """Tokens that N states have read but not yet written: the first ``calls`` % n of n slots, in their order.

    A slot of zeros changes no state.
    """

    keys: Tensor  # [N, Hk, n, K], in the dtype of the keys
    values: Tensor  # [N, H, n, V], in the dtype of the values; float32 for the delta rule
    decays: Tensor | None  # [N, H, n] or [N, H, n, K], float32
    calls: Tensor  # [1] int64, so far; the caller adds one after all states have read a token

    def rows(self, rows: slice) -> Deferred:
        """Views of some of the N states."""
        decays = None if self.decays is None else self.decays[rows]
        return Deferred(self.keys[rows], self.values[rows], decays, self.calls)


def refusal(x: Flat) -> str | None:
    """Reason why writes cannot be deferred for calls like ``x``, or None if they can."""
    if any(t is not None for t in (x.read, x.write, x.bonus)) or x.denominator:
        return "writes are deferred only for the plain rule and the delta rule without a normaliser"
    if x.initial is None or x.v.shape[1] != 1 or x.cu_seqlens is not None:
        return "writes are deferred only in steps of one token from given states"
    return "states in float64 are written at each step" if x.v.dtype == torch.float64 else None


def empty(x: Flat, rows: int, slots: int, calls: Tensor) -> Deferred:
    """Zeros for ``rows`` states and ``slots`` calls like ``x``."""
    (Hk, K), (H, V) = x.k.shape[2:], x.v.shape[2:]
    device = calls.device
    values = torch.zeros(rows, H, slots, V, dtype=x.v.dtype if x.beta is None else torch.float32, device=device)
    decays = None
    if x.decay is not None:
        decays = torch.zeros(rows, H, slots, *((K,) if x.decay.ndim in (2, 4) else ()), device=device)
    return Deferred(torch.zeros(rows, Hk, slots, K, dtype=x.k.dtype, device=device), values, decays, calls)


def written(state: Tensor, deferred: Deferred, used: Tensor | int) -> Tensor:
    """Return ``state`` [N, H, K, V] with the tokens in the first ``used`` slots written into it."""
    slots = deferred.keys.shape[2]
    taken = torch.arange(slots, device=state.device) < used
    group = state.shape[1] // deferred.keys.shape[1]
    keys = deferred.keys.repeat_interleave(group, 1).float().masked_fill(~taken[:, None], 0.0)  # [N, H, n, K]
    values = deferred.values.float().masked_fill(~taken[:, None], 0.0)
    if deferred.decays is None:
        return state + keys.mT @ values
    decays = deferred.decays if deferred.decays.ndim == 4 else deferred.decays[..., None]
    decays = decays.masked_fill(~taken[:, None], 0.0)
    later = torch.cat([decays[:, :, 1:], torch.zeros_like(decays[:, :, :1])], 2).flip(2).cumsum(2).flip(2)  # of the slots behind each
    factor = (later[:, :, 0] + decays[:, :, 0]).exp()[..., None]
    return torch.where(factor > 0, state, 0.0) * factor + (keys * later.exp()).mT @ values


def step_(x: Flat, deferred: Deferred) -> Tensor:
    """Compute o [B, 1, H, V] of one token; puts it into the next slot, and after the last slot writes all into ``x.initial``."""
    state, H = x.initial, x.v.shape[2]
    assert state is not None
    used = deferred.calls % deferred.keys.shape[2]
    q, k = (shared(t, H)[:, 0].float() for t in (x.q, x.k))
    v = x.v[:, 0].float()
    now = written(state, deferred, used)
    decay = torch.zeros((), device=v.device)
    if x.decay is not None:
        decay = (x.decay[:, 0] if x.decay.ndim > 2 else x.decay.expand(len(v), *x.decay.shape)).float()
        factor = decay.exp() if x.decay.ndim in (2, 4) else decay.exp()[..., None]
        now = torch.where(factor[..., None] > 0, now, 0.0) * factor[..., None]
    if x.beta is not None:
        v = x.beta[:, 0, :, None].float() * (v - (k[..., None] * now).sum(2))
    now = now + k[..., None] * v[..., None, :]
    deferred.keys.index_copy_(2, used, x.k[:, 0, :, None])
    deferred.values.index_copy_(2, used, v[:, :, None].to(deferred.values.dtype))
    if deferred.decays is not None:
        deferred.decays.index_copy_(2, used, decay[:, :, None])
    state.copy_(torch.where(used + 1 == deferred.keys.shape[2], now, state))
    return ((q * x.scale)[..., None] * now).sum(2)[:, None].to(x.v.dtype)
