"""The chunk form in plain torch: matrix products inside chunks, one short loop from chunk to chunk.

The parallel form is the same with one chunk for the whole sequence. Differentiable as often as one likes; the loop walks
over unbound slices, so its backward is linear in the number of chunks too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from linattn.ops.inputs import Inputs
from linattn.ops.torch.decay import ChannelDecay, Factor, HeadDecay, NoDecay
from linattn.ops.torch.layout import Dense, Packed, layout_of, shared

SIZE = 64


def size_for(inputs: Inputs) -> int:
    """64 tokens a chunk, fewer where the sequences are shorter."""
    sequences = 1 if inputs.cu_seqlens is None else max(1, inputs.rows)
    return min(SIZE, power_of_two(-(-inputs.k.shape[1] // sequences)))


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least ``n``."""
    return 1 << max(0, n - 1).bit_length()


@dataclass(frozen=True)
class Step:
    """How a chunk moves the state: S' = exp(total) S + write + keyᵀ x, where x = fresh + reach S is what it corrects.

    All have chunks first: total [N, B, H, 1 or K, 1], write [N, B, H, K, V], key and reach [N, B, H, C, K], fresh [N, B, H, C, V].
    """

    total: Tensor | None
    write: Tensor | None = None
    key: Tensor | None = None
    reach: Tensor | None = None
    fresh: Tensor | None = None


def causal(inputs: Inputs, v: Tensor, initial: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """``v`` [B, T, H, V] and ``initial`` [N, H, K, V] in one dtype, chunks of ``size`` tokens; returns the outputs and the final states."""
    layout = layout_of(inputs, size)
    dtype = v.dtype
    q, k = (layout.split(shared(x, inputs.heads), dtype) for x in (inputs.q, inputs.k))  # [N, B, H, C, K]
    q, v = q * inputs.scale, layout.split(v, dtype)
    decay = _decay(inputs, layout, dtype)
    key = decay.to_end(k)
    if inputs.beta is not None:
        beta = layout.split(inputs.beta[..., None], dtype)  # [N, B, H, C, 1]
        steps = _delta(k, v, beta, decay, key)
    elif inputs.erase is not None:
        read, write = (layout.split(e, dtype) for e in inputs.erase)
        steps = _erase(k, v, read, write, decay, key)
    else:
        steps = Step(decay.total, key.mT @ v)
    states, corrected, final = carry(steps, layout, initial)
    if inputs.bonus is not None:
        own = (q * inputs.bonus.to(dtype)[:, None] * k).sum(-1, keepdim=True) * v
        return layout.join(decay.from_start(q, True) @ states + decay.products(q, k, True) @ v + own), final
    o = decay.from_start(q) @ states + decay.products(q, k) @ (v if inputs.beta is None else corrected)
    if inputs.erase is not None:
        o = o + decay.products(q, write) @ corrected
    return layout.join(o), final


def _decay(inputs: Inputs, layout: Dense | Packed, dtype: torch.dtype) -> NoDecay:
    log = inputs.decay
    if log is None:
        return NoDecay()
    if inputs.decay_constant:
        if isinstance(layout, Dense) and layout.tokens % layout.size == 0:  # no padding to keep from fading: one chunk serves all
            log = log.to(dtype).unsqueeze(1).expand(-1, layout.size, *log.shape[1:])[None, None]
            return ChannelDecay(log) if inputs.decay_per_channel else HeadDecay(log)
        log = log.expand(*inputs.k.shape[:2], *log.shape)
    if inputs.decay_per_channel:
        return ChannelDecay(layout.split(log, dtype))
    return HeadDecay(layout.split(log[..., None], dtype)[..., 0])


def _delta(k: Tensor, v: Tensor, beta: Tensor, decay: NoDecay, key: Tensor) -> Step:
    """u_i = β_i (v_i − k_i D_i) is what token i writes with k_i; D_i holds the writes before it in the chunk: a triangular system."""
    system = (beta * decay.products(k, k)).tril(-1)
    u = _solve(system, beta * torch.cat([v, -decay.from_start(k)], -1))
    fresh, reach = u.split([v.shape[-1], k.shape[-1]], -1)
    return Step(decay.total, None, key, reach, fresh)


def _erase(k: Tensor, v: Tensor, read: Tensor, write: Tensor, decay: NoDecay, key: Tensor) -> Step:
    """x_i = r_i S_{i-1} is written with w_i beside k_i v_i; S_{i-1} holds the x before it in the chunk: a triangular system."""
    system = -decay.products(read, write, True)
    x = _solve(system, torch.cat([decay.products(read, k, True) @ v, decay.from_start(read, True)], -1))
    fresh, reach = x.split([v.shape[-1], k.shape[-1]], -1)
    return Step(decay.total, key.mT @ v, decay.to_end(write), reach, fresh)


def _solve(strict: Tensor, right: Tensor) -> Tensor:
    """(I + strict) x = right by forward substitution; a Neumann series of ``strict`` diverges for similar keys at β = 2."""
    return torch.linalg.solve_triangular(strict, right, upper=False, unitriangular=True)


def carry(step: Step, layout: Dense | Packed, initial: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
    """Walk the chunks. Returns the states before each [N, B, H, K, V], the corrections x [N, B, H, C, V] and the final states."""
    shape = (step.fresh if step.write is None else step.write).shape[:3]  # type: ignore[union-attr]

    def slices(x: Tensor | None) -> tuple[Tensor | None, ...]:  # each [B H, ., .]
        return (None,) * shape[0] if x is None else x.expand(*shape, *x.shape[3:]).flatten(1, 2).unbind()

    enter = layout.entrance(initial)
    state, before, after, corrections = initial[: shape[1]].flatten(0, 1), [], [], []
    factors = None if step.total is None else list(map(Factor, *(slices(f) for f in Factor.of(step.total))))
    parts = (step.write, None if step.key is None else step.key.mT, step.reach, step.fresh)
    for n, (write, key, reach, fresh) in enumerate(zip(*map(slices, parts), strict=True)):
        state = enter(state, n)
        before.append(state)
        if fresh is not None:
            corrections.append(torch.baddbmm(fresh, reach, state))
            write = key @ corrections[-1] if write is None else torch.baddbmm(write, key, corrections[-1])
        state = state + write if factors is None else factors[n].apply(state, write)
        after.append(state)
    states, corrected = (torch.stack(x).unflatten(1, shape[1:]) if x else None for x in (before, corrections))
    return states, corrected, layout.leave([s.unflatten(0, shape[1:]) for s in after], initial)  # type: ignore[return-value]

