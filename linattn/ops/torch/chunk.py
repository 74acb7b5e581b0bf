"""The chunk form in plain torch: matrix products inside chunks, one short loop from chunk to chunk.

The parallel form is the same with one chunk for the whole sequence. Differentiable as often as one likes; the loops walk
over slices that were split once, so their backward is linear in the number of chunks too.
"""

from __future__ import annotations

import math
from itertools import repeat
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from linattn.ops.inputs import Inputs
from linattn.ops.torch.decay import ChannelDecay, Factor, HeadDecay, NoDecay, least
from linattn.ops.torch.layout import Dense, Packed, Passage, layout_of, shared

SIZE = 64


def size_for(inputs: Inputs) -> int:
    """64 tokens a chunk, fewer where the sequences are shorter."""
    sequences = 1 if inputs.cu_seqlens is None else max(1, inputs.rows)
    return min(SIZE, power_of_two(-(-inputs.k.shape[1] // sequences)))


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least ``n``."""
    return 1 << max(0, n - 1).bit_length()


class Slab(NamedTuple):
    """n chunks: q, k, read, write [n, B, H, C, K], v [n, B, H, C, V], beta [n, B, H, C, 1], bonus [H, 1, K]."""

    q: Tensor
    k: Tensor
    v: Tensor
    decay: NoDecay
    beta: Tensor | None
    read: Tensor | None
    write: Tensor | None
    bonus: Tensor | None
    scale: float


class Step(NamedTuple):
    """How a chunk moves the state: S' = exp(total) S + write + keyᵀ x, where x = fresh + reach S is what it corrects.

    total [n, B, H, 1 or K, 1], write [n, B, H, K, V], key and reach [n, B, H, C, K], fresh [n, B, H, C, V].
    """

    total: Tensor | None
    write: Tensor | None = None
    key: Tensor | None = None
    reach: Tensor | None = None
    fresh: Tensor | None = None


def causal(inputs: Inputs, v: Tensor, initial: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """``v`` [B, T, H, V] and ``initial`` [N, H, K, V] in one dtype, chunks of ``size`` tokens; returns the outputs and the final states."""
    layout = layout_of(inputs, size)
    passage = layout.passage(initial)
    outputs = [_outputs(slab, *carry(_step(slab), passage)) for slab in _slabs(inputs, v, layout)]
    return layout.join(outputs), passage.final()


def _slabs(inputs: Inputs, v: Tensor, layout: Dense | Packed):
    def split(x: Tensor | None):
        return repeat(None) if x is None else layout.split(x, v.dtype)

    q, k = (split(shared(x, inputs.heads)) for x in (inputs.q, inputs.k))
    beta = split(None if inputs.beta is None else inputs.beta[..., None])
    read, write = map(split, inputs.erase or (None, None))
    bonus = None if inputs.bonus is None else inputs.bonus.to(v.dtype)[:, None]
    for q, k, v, decay, beta, read, write in zip(q, k, split(v), _decays(inputs, layout, v.dtype), beta, read, write, strict=False):
        yield Slab(q, k, v, decay, beta, read, write, bonus, inputs.scale)


def _decays(inputs: Inputs, layout: Dense | Packed, dtype: torch.dtype):
    """The decay of each slab; one for all where it is constant and there is no padding to keep from fading."""
    log, kind = inputs.decay, ChannelDecay if inputs.decay_per_channel else HeadDecay
    if log is None:
        return repeat(NoDecay())
    if inputs.decay_constant and isinstance(layout, Dense) and not layout.padding:
        return repeat(kind(log.to(dtype).unsqueeze(1).expand(-1, layout.size, *log.shape[1:])[None, None]))
    if inputs.decay_constant:
        log = log.expand(*inputs.k.shape[:2], *log.shape)
    if inputs.decay_per_channel:
        return map(kind, layout.split(log, dtype))
    return (kind(s[..., 0]) for s in layout.split(log[..., None], dtype))


def _step(slab: Slab) -> Step:
    _, k, v, decay, beta, read, write, _, _ = slab
    if beta is not None:
        # u_i = β_i (v_i − k_i D_i) is what token i writes with k_i; D_i holds the writes before it: a triangular system.
        inverse = _Inverse.apply(beta * decay.products(k, k))
        return Step(decay.total, None, decay.to_end(k), _flush(inverse @ (decay.from_start(-beta) * k)), inverse @ (beta * v))
    written = decay.to_end(k).mT @ v
    if read is None:
        return Step(decay.total, written)
    # x_i = r_i S_{i-1} is written with w_i beside k_i v_i; S_{i-1} holds the x before it: a triangular system.
    inverse = _Inverse.apply(-decay.products(read, write, exclusive=True))
    fresh = inverse @ (decay.products(read, k, exclusive=True) @ v)
    reach = _flush(inverse @ decay.from_start(read, exclusive=True))
    return Step(decay.total, written, decay.to_end(write), reach, fresh)


class _Inverse(torch.autograd.Function):
    """(I + strict)⁻¹ of what stands below the diagonal, by forward substitution: a Neumann series diverges for similar keys at β = 2.

    A CPU does it in float64, where products of strongly decayed numbers are not subnormal, which would be slow.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(strict: Tensor) -> Tensor:
        dtype = torch.float64 if strict.device.type == "cpu" else strict.dtype
        eye = torch.eye(strict.shape[-1], dtype=dtype, device=strict.device)
        inverse = torch.linalg.solve_triangular(strict.to(dtype), eye.expand_as(strict), upper=False, unitriangular=True)
        return _flush(inverse, strict.dtype).to(strict.dtype)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        (inverse,) = ctx.saved_tensors
        return -(inverse.mT @ gradient @ inverse.mT).tril(-1)


def _flush(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """``x`` with 0 for what is too small to count in ``dtype``, its own if None."""
    return F.hardshrink(x, math.exp(least(dtype or x.dtype)))


def _outputs(slab: Slab, states: Tensor, corrected: Tensor | None) -> Tensor:
    """What the queries read: the states before the chunks and what the chunks themselves wrote. [n, B, H, C, V]."""
    q, k, v, decay, beta, _, write, bonus, scale = slab
    before = bonus is not None  # the bonus stands for the token itself
    o = _add(decay.from_start(q, before) @ states, decay.products(q, k, before), v if beta is None else corrected, scale, scale)
    if bonus is not None:
        return o + (q * (scale * bonus) * k).sum(-1, keepdim=True) * v
    return o if write is None else _add(o, decay.products(q, write), corrected, 1.0, scale)


def _add(o: Tensor, a: Tensor, b: Tensor, of_o: float, of_ab: float) -> Tensor:
    """``of_o * o + of_ab * a @ b`` in one pass."""
    return torch.baddbmm(o.flatten(0, 2), a.flatten(0, 2), b.flatten(0, 2), beta=of_o, alpha=of_ab).view_as(o)


def carry(step: Step, passage: Passage) -> tuple[Tensor, Tensor | None]:
    """Walk the chunks. Returns the states before each [n, B, H, K, V] and the corrections x [n, B, H, C, V]."""
    shape = (step.fresh if step.write is None else step.write).shape[:3]  # type: ignore[union-attr]

    def slices(x: Tensor | None):  # each [B H, ., .]
        return repeat(None, shape[0]) if x is None else x.expand(*shape, *x.shape[3:]).flatten(1, 2).unbind()

    factors = slices(None) if step.total is None else map(Factor, *(slices(f) for f in Factor.of(step.total)))
    key = None if step.key is None else step.key.mT
    before, corrections = [], []
    for factor, write, key, reach, fresh in zip(factors, *map(slices, (step.write, key, step.reach, step.fresh)), strict=True):
        state = passage.enter().flatten(0, 1)  # [B H, K, V]
        before.append(state)
        if fresh is not None:
            corrections.append(torch.baddbmm(fresh, reach, state))
            write = key @ corrections[-1] if write is None else torch.baddbmm(write, key, corrections[-1])
        state = state + write if factor is None else factor.apply(state, write)
        passage.leave(state.unflatten(0, shape[1:]))
    states, corrected = (torch.stack(x).unflatten(1, shape[1:]) if x else None for x in (before, corrections))
    return states, corrected  # type: ignore[return-value]
