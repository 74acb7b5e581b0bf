"""Chunk form in operations of torch: matrix products inside chunks, and a short loop over chunks.

The parallel form is the same with one chunk for the whole sequence. Differentiable any number of times; the loops iterate over
slices that were split once, so that the backward pass is also linear in the number of chunks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from itertools import repeat
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from linattn.ops import tracing
from linattn.ops.inputs import Delta, Erase, Inputs, operands
from linattn.ops.torch.decay import ChannelDecay, Factor, HeadDecay, NoDecay, least
from linattn.ops.torch.layout import Dense, Packed, Passage, layout_of, shared

SIZE = 64
SMALL = 32  # for decays per channel, whose pairs of tokens are expensive, and for triangular systems, whose errors grow with their size


def size_for(inputs: Inputs) -> int:
    """Tokens per chunk, fewer for shorter sequences."""
    sequences = 1 if inputs.cu_seqlens is None else max(1, inputs.rows)
    small = inputs.decay_per_channel or isinstance(inputs.rule, (Delta, Erase))
    return min(SMALL if small else SIZE, power_of_two(-(-inputs.k.shape[1] // sequences)))


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least ``n``."""
    return 1 << max(0, n - 1).bit_length()


class Slab(NamedTuple):
    """Inputs of n chunks: q, k, read, write [n, B, H, C, K], v [n, B, H, C, V], beta [n, B, H, C, 1], bonus [H, 1, K]."""

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
    """Change of the state by a chunk: S' = exp(total) S + write + keyᵀ x, where x = fresh + reach S are the corrections.

    total [n, B, H, 1 or K, 1], write [n, B, H, K, V], key and reach [n, B, H, C, K], fresh [n, B, H, C, V].
    """

    total: Tensor | None
    write: Tensor | None = None
    key: Tensor | None = None
    reach: Tensor | None = None
    fresh: Tensor | None = None


def causal(inputs: Inputs, v: Tensor, initial: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Run ``v`` [B, T, H, V] from ``initial`` [N, H, K, V], in one dtype, in chunks of ``size``; returns outputs and final states."""
    layout = layout_of(inputs, size)
    passage = layout.passage(initial)
    outputs = [_outputs(slab, *carry(_step(slab), passage)) for slab in _slabs(inputs, v, layout)]
    return layout.join(outputs), passage.final()


def _slabs(inputs: Inputs, v: Tensor, layout: Dense | Packed) -> Iterator[Slab]:
    def split(x: Tensor | None) -> Iterable[Any]:
        return repeat(None) if x is None else layout.split(x, v.dtype)

    q, k = ((shared(slab, inputs.heads) for slab in split(x)) for x in (inputs.q, inputs.k))
    beta, read, write, bonus = operands(inputs.rule)
    bonus = None if bonus is None else bonus.to(v.dtype)[:, None]
    timed = split(None if beta is None else beta[..., None]), split(read), split(write)
    for q, k, v, decay, beta, read, write in zip(q, k, split(v), _decays(inputs, layout, v.dtype), *timed, strict=False):
        yield Slab(q, k, v, decay, beta, read, write, bonus, inputs.scale)


def _decays(inputs: Inputs, layout: Dense | Packed, dtype: torch.dtype) -> Iterable[ChannelDecay | HeadDecay | NoDecay]:
    """Decay of each slab; a single one if it is constant and there is no padding, which must not decay."""
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
        fresh, reach = _solve(lambda k: beta * decay.products(k, k), (k,), beta * v, decay.from_start(-beta) * k)
        return Step(decay.total, None, decay.to_end(k), reach, fresh)
    written = decay.to_end(k).mT @ v
    if read is None or write is None:
        return Step(decay.total, written)
    # x_i = r_i S_{i-1} is written with w_i beside k_i v_i; S_{i-1} holds the x before it: a triangular system.
    within = decay.products(read, k, exclusive=True) @ v
    before = decay.from_start(read, exclusive=True)
    fresh, reach = _solve(lambda r, w: -decay.products(r, w, exclusive=True), (read, write), within, before)
    return Step(decay.total, written, decay.to_end(write), reach, fresh)


def _solve(system: Callable[..., Tensor], factors: tuple[Tensor, ...], fresh: Tensor, reach: Tensor) -> tuple[Tensor, Tensor]:
    """Multiply ``fresh`` and ``reach`` [..., C, X] by (I + L)⁻¹, where L is ``system(*factors)`` [..., C, C] below its diagonal.

    A CPU builds and solves the system in float64: similar keys at β = 2 lose a digit, and products of strongly decayed numbers would
    be subnormal in float32, which is slow. The solution is applied in float64 too, also to gradients: every later chunk depends on the
    correction of a chunk, and at β = 2 nothing damps the rounding errors of float32 sums: they accumulate, up to five times as much in
    some orders of summation as in others. The gradient of the system itself does not need float64.
    """
    if tracing.forward_mode() or tracing.loses_gradients():  # operations of torch have derivatives in forward mode, and when compiled
        exact = system(*(f.double() for f in factors) if fresh.device.type != "mps" else factors)
        return _Solve.forward(exact, exact, fresh, reach)[:2]
    if fresh.device.type != "cpu" or fresh.dtype == torch.float64:
        strict = system(*factors)
        exact = strict.detach()
    else:
        exact = system(*(f.detach().double() for f in factors)).detach()
        strict = system(*factors) if torch.is_grad_enabled() else exact.detach()
    return _Solve.apply(strict, exact, fresh, reach)[:2]


class _Solve(torch.autograd.Function):
    """Solve a triangular system by forward substitution: a Neumann series diverges for similar keys at β = 2.

    The third output is the inverse itself. The gradient is computed from the outputs, so it solves no further system and is
    differentiable.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(strict: Tensor, exact: Tensor, fresh: Tensor, reach: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        eye = torch.eye(exact.shape[-1], dtype=exact.dtype, device=exact.device)
        inverse = torch.linalg.solve_triangular(exact, eye.expand_as(exact), upper=False, unitriangular=True)
        smallest = math.exp(least(fresh.dtype))
        inverse = F.hardshrink(inverse, smallest)
        fresh, reach = ((inverse @ x.to(inverse.dtype)).to(x.dtype) for x in (fresh, reach))
        return fresh, F.hardshrink(reach, smallest), inverse.to(fresh.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        solutions = ctx.saved_tensors
        right = [None if g is None else _cancelling(solutions[2].mT, g) for g in gradients]
        strict = [-(y @ x.mT) for y, x in zip(right, solutions, strict=True) if y is not None]
        return sum(strict[1:], strict[0]).tril(-1) if strict else None, None, right[0], right[1]


def _cancelling(a: Tensor, b: Tensor) -> Tensor:
    """Compute ``a @ b``, in float64 on a CPU, because its terms alternate in sign at β = 2."""
    if a.device.type != "cpu" or a.dtype == torch.float64:
        return a @ b
    return (a.double() @ b.double()).to(b.dtype)


def _outputs(slab: Slab, states: Tensor, corrected: Tensor | None) -> Tensor:
    """Compute outputs [n, B, H, C, V] from the states before the chunks and the writes inside them."""
    q, k, v, decay, beta, _, write, bonus, scale = slab
    before = bonus is not None  # the bonus is the weight of the token itself
    values = v if beta is None or corrected is None else corrected
    o = _add(decay.from_start(q, before) @ states, decay.products(q, k, before), values, scale, scale)
    if bonus is not None:
        return o + (q * (scale * bonus) * k).sum(-1, keepdim=True) * v
    return o if write is None or corrected is None else _add(o, decay.products(q, write), corrected, 1.0, scale)


def _add(o: Tensor, a: Tensor, b: Tensor, of_o: float, of_ab: float) -> Tensor:
    """Compute ``of_o * o + of_ab * a @ b`` in one pass."""
    return torch.baddbmm(o.flatten(0, 2), a.flatten(0, 2), b.flatten(0, 2), beta=of_o, alpha=of_ab).view_as(o)


def carry(step: Step, passage: Passage) -> tuple[Tensor, Tensor | None]:
    """Iterate over the chunks; returns the states before each [n, B, H, K, V] and the corrections x [n, B, H, C, V]."""
    shape = (step.fresh if step.write is None else step.write).shape[:3]  # type: ignore[union-attr]

    def slices(x: Tensor | None) -> Iterable[Any]:  # each [B H, ., .]
        return repeat(None, shape[0]) if x is None else x.expand(*shape, *x.shape[3:]).flatten(1, 2).unbind()

    factors = slices(None) if step.total is None else map(Factor, *(slices(f) for f in Factor.of(step.total)))
    key = None if step.key is None else step.key.mT
    before, corrections = [], []
    for factor, write, key, reach, fresh in zip(factors, *map(slices, (step.write, key, step.reach, step.fresh)), strict=True):
        state = passage.enter().flatten(0, 1)  # [B H, K, V]
        before.append(state)
        if fresh is not None:
            corrections.append(torch.baddbmm(fresh, reach, state))
            written = _cancelling(key, corrections[-1])
            write = written if write is None else write + written
        state = state + write if factor is None else factor.apply(state, write)
        passage.leave(state.unflatten(0, shape[1:]))
    states, corrected = (torch.stack(x).unflatten(1, shape[1:]) if x else None for x in (before, corrections))
    return states, corrected  # type: ignore[return-value]
