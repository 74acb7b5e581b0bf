"""Softmax attention of one query per row to a preallocated cache, as in a decoding step; each key is read once.

Heads that share keys are computed together, as several queries of one head. On a CPU only the slots in use are read. A captured
GPU step reads all slots, in pieces for separate programs, because with a mask torch's kernel has only one program per head and leaves
most of the GPU idle.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from linattn.ops import steps, tracing
from linattn.ops.operator import refused, register

PIECE = 256  # slots of a piece on a GPU


def one_query(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, taken: Tensor) -> Tensor:
    """Compute attention of q [B, 1, H, K] to k [B, S, Hk, K] and v [B, S, Hk, V] with mask ``seen`` [B, S] bool: [B, 1, H, V].

    H is a multiple of Hk; every row sees at least one slot, and none beyond the ``taken`` [B] slots, equal in all rows. No copy of k
    is made if the slots of a head are adjacent in memory. There are no gradients.
    """
    if q.device.type == "cpu":
        return cast(Tensor, operator(q, k, v, seen, taken))
    o = in_pieces(_together(q, k), k.transpose(1, 2), v.transpose(1, 2), seen, PIECE)
    return o.flatten(1, 2)[:, None]


def append(cache: Tensor, slot: Tensor, new: Tensor) -> Tensor:
    """Return ``cache`` [B, S, ...] with ``new`` [B, 1, ...] at ``slot`` [1] int64."""
    return cast(Tensor, _append(cache, slot, new) if tracing.recording_step() else cache.index_copy(1, slot, new))


def append_(cache: Tensor, slot: Tensor, new: Tensor) -> None:
    """Write ``new`` to ``cache`` at ``slot``, in place."""
    cache.index_copy_(1, slot, new)


_append = steps.define(
    "append", "(Tensor cache, Tensor slot, Tensor new) -> Tensor next", lambda cache, slot, new: cache.index_copy(1, slot, new),
    lambda cache, *_: torch.empty_like(cache), steps.Step(append_, {"cache": "next"}),
)  # fmt: skip


def of_taken(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, taken: Tensor) -> Tensor:
    """Compute :func:`one_query` if the number of slots in use can be read."""
    n = int(taken[0]) + 1
    keys, values = k[:, :n].transpose(1, 2), v[:, :n].transpose(1, 2)  # [B, Hk, n, ...]
    return F.scaled_dot_product_attention(_together(q, k), keys, values, attn_mask=seen[:, None, None, :n]).flatten(1, 2)[:, None]


def _fake(q: Tensor, _: Tensor, v: Tensor, *__: Tensor) -> Tensor:
    return q.new_empty(*q.shape[:3], v.shape[3])


# An operator, so that tracing does not read the number of slots in use.
operator = register(
    "one_query", "(Tensor q, Tensor k, Tensor v, Tensor seen, Tensor taken) -> Tensor", of_taken, _fake,
    gradient=refused("linattn::one_query has no gradients"),
)  # fmt: skip


def in_pieces(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, size: int) -> Tensor:
    """Compute attention of q [B, Hk, G, K] to k, v [B, Hk, S, ...] with mask ``seen`` [B, S] bool: [B, Hk, G, V].

    The slots are processed in pieces of ``size``, or as one piece if ``size`` does not divide them; scores and sums are float32
    (float64 for float64).
    """
    parts = k.shape[2] // size if k.shape[2] % size == 0 else 1
    apart = (*k.shape[:2], parts)  # B, Hk, P
    k, v = (t.unflatten(2, (parts, -1)).flatten(0, 2) for t in (k, v))  # [B Hk P, S / P, ...]
    scores = _product(q[:, :, None].expand(-1, -1, parts, -1, -1).flatten(0, 2), k.mT).unflatten(0, apart) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~seen.unflatten(1, (parts, -1))[:, None, :, None], -torch.inf)  # [B, Hk, P, G, S / P]
    weights = (scores - scores.amax((2, 4), keepdim=True)).exp()
    o = _product(weights.to(v.dtype).flatten(0, 2), v).unflatten(0, apart).sum(2)
    return (o / weights.sum((2, 4))[..., None]).to(v.dtype)


def _together(q: Tensor, k: Tensor) -> Tensor:
    """Group q [B, 1, H, K] by the heads of k [B, S, Hk, K]: [B, Hk, G, K]."""
    return q[:, 0].unflatten(1, (k.shape[2], -1))


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Multiply ``a`` [N, I, J] by ``b`` [N, J, L] in float32 (float64 for float64)."""
    if a.dtype in (torch.float32, torch.float64):
        return torch.bmm(a, b)
    return torch.bmm(a, b, out_dtype=torch.float32) if a.is_cuda else torch.bmm(a.float(), b.float())
