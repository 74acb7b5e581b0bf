"""Linear attention whose state fades by a factor per row times a factor per column: the outer decay of decaying fast weights.

S_t = (α_tᵀ β_t) ⊙ S_{t-1} + k_tᵀ v_t          o_t = q_t S_t

This is not an option of :func:`linattn.linear_attention`, because every kernel there would need β for a single system. It runs in
operations of torch on every device.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from linattn.ops import checks, sharding
from linattn.ops.inputs import Given, Inputs
from linattn.ops.torch.chunk import Step, carry, size_for
from linattn.ops.torch.decay import ChannelDecay, halves
from linattn.ops.torch.layout import layout_of


@sharding.shards
def outer_decay(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_decay: Tensor,
    value_decay: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    return_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute ``S_t = exp(key_decay_t)ᵀ exp(value_decay_t) ⊙ S_{t-1} + k_tᵀ v_t`` and ``o_t = scale · q_t S_t`` in chunks.

    Exact for any decay, because no exponent is above 0; the quadratic form of the literature, which divides keys by the product of
    all α and values by that of all β, overflows.

    Args:
        q, k: [B, T, H, K]. v: [B, T, H, V]. One dtype: float64, float32, bfloat16 or float16.
        key_decay: natural logarithm of α, at most 0, [B, T, H, K]; -inf resets. In the dtype of q or in float32.
        value_decay: natural logarithm of β, the same with [B, T, H, V].
        scale: factor of q; K ** -0.5 if None.
        initial_state: S [N, H, K, V] in float32 (float64 for float64).
        return_state: return ``(o, S)``.
        cu_seqlens: [N + 1] integers: B is 1 and N sequences lie end to end.

    Returns:
        ``o`` [B, T, H, V] in the dtype of v, and the state if asked for.

    Raises:
        ValueError: for invalid shapes, dtypes, devices and values.
    """
    given = Given(q, k, v, scale=scale, initial_state=initial_state, return_state=return_state, cu_seqlens=cu_seqlens)
    inputs, _ = checks.call(given)
    if k.shape[2] != v.shape[2]:
        raise ValueError(f"q and k must have as many heads as v, {v.shape[2]}, but came with {k.shape[2]}")
    for name, t, wanted, like in (("key_decay", key_decay, "[B, T, H, K]", k), ("value_decay", value_decay, "[B, T, H, V]", v)):
        checks.shape(name, checks.tensor(name, t, v), wanted, tuple(like.shape))
        checks.dtype(name, t, v.dtype, inputs.compute_dtype)
        checks.not_positive(name, t)
    with checks.no_autocast(v):
        o, s = _chunks(replace(inputs, decay=key_decay), key_decay, value_decay)
    return (o.to(v.dtype), s) if return_state else o.to(v.dtype)


def _chunks(inputs: Inputs, key_decay: Tensor, value_decay: Tensor) -> tuple[Tensor, Tensor]:
    dtype, initial = inputs.compute_dtype, inputs.initial
    if initial is None:
        initial = inputs.v.new_zeros(inputs.rows, inputs.heads, inputs.k.shape[-1], inputs.v.shape[-1], dtype=dtype)
    if inputs.v.shape[1] == 0 or inputs.rows == 0:
        return inputs.v.to(dtype), initial
    layout = layout_of(inputs, size_for(inputs))
    passage = layout.passage(initial)
    slabs = zip(*(layout.split(t, dtype) for t in (inputs.q, inputs.k, inputs.v, key_decay, value_decay)), strict=True)
    outputs = []
    for q, k, v, of_keys, of_values in slabs:  # [n, B, H, C, ...]
        a, b = ChannelDecay(of_keys), ChannelDecay(of_values)
        total = of_keys.sum(-2)[..., :, None] + of_values.sum(-2)[..., None, :]  # [n, B, H, K, V]
        before, _ = carry(Step(total, a.to_end(k).mT @ b.to_end(v)), passage)
        q = q * inputs.scale
        outputs.append(b.from_start(a.from_start(q) @ before) + _within(q, k, v, a, b))
    return layout.join(outputs), passage.final()


def _within(q: Tensor, k: Tensor, v: Tensor, a: ChannelDecay, b: ChannelDecay) -> Tensor:
    """Output of each token from its own chunk: itself, and for h = 1, 2, 4, ... the h tokens of the first half of its block of 2h.

    Between the halves every decay is the product of a part before and a part after the boundary, for rows and columns.
    """
    o = (q * k).sum(-1, keepdim=True) * v
    for level, ((a_later, a_earlier), (b_later, b_earlier)) in enumerate(zip(a.borders, b.borders, strict=True)):
        h = 2**level
        scores = (halves(q, h)[1] * a_later) @ (halves(k, h)[0] * a_earlier).mT  # [..., C / 2h, h, h]
        across = b_later * (scores @ (halves(v, h)[0] * b_earlier))
        o = o + torch.stack([torch.zeros_like(across), across], -3).flatten(-4, -2)
    return o
