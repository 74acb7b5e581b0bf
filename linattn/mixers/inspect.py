"""Inspection of a mixer: its mixing matrix, and the agreement of its forms."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from linattn.arguments import described, whole
from linattn.mixers.base import Mixer, Recurrence
from linattn.mixers.context import CallContext, State
from linattn.mixers.fault import tensor_fault
from linattn.ops.inputs import Form


def mixing_matrix(mixer: Mixer, x: Tensor, *others: Any) -> Tensor:
    """Mixing matrix: share of token j's value in output i, [B, H, T, T], zero above the diagonal if the mixer is causal.

    The mixer itself is run with the unit vectors of the tokens as values, so delta rules, normalisers and softmax need no
    equations of their own here. Times :func:`values` it is the output of the recurrence, before ``skip`` and ``read``.

    Args:
        mixer: any mixer whose output is linear in its values.
        x: tokens [B, T, D].
        others: further arguments of a call: height and width of a grid, or the context [B, S, D], whose tokens are then the
            columns, [B, H, T, S].

    Raises:
        ValueError: if there is no such matrix (``info.linear_in_values`` is False, as for the LSTM).
    """
    if not isinstance(mixer, Mixer):
        raise TypeError(f"mixer must be a linattn.Mixer, but came as {described(mixer)}")
    mixer.check_width("x", x)
    if (line := tensor_fault("x", x, [*mixer.parameters(), *mixer.buffers()])) is not None:
        raise ValueError(line)
    if not x.shape[1]:
        raise ValueError(f"x must hold at least one token, but came with {list(x.shape)}")
    r, call = _recurrence(mixer, x, *others)
    batch, tokens, heads, _ = r.v.shape
    token = torch.eye(tokens, dtype=r.v.dtype, device=r.v.device)[None, :, None].expand(batch, -1, heads, -1)  # [B, T, H, V = T]
    return mixer.attend(replace(r, v=token), call).permute(0, 2, 1, 3)


def values(mixer: Mixer, x: Tensor, *others: Any) -> Tensor:
    """Values that :func:`mixing_matrix` weighs, [B, T, H, V], written by the tokens ``x`` [B, T, D], for every head of the output."""
    r, _ = _recurrence(mixer, x, *others)
    return r.v.repeat_interleave(max(r.q.shape[2] // r.v.shape[2], 1), 2)


def _recurrence(mixer: Mixer, x: Tensor, *others: Any) -> tuple[Recurrence, CallContext]:
    info = getattr(mixer, "info", None)  # unregistered mixers can be inspected too
    if info is not None and not info.linear_in_values:
        raise ValueError(f"mixer: {info.name} has no mixing matrix: its output is not linear in values that the tokens write")
    call = mixer.begin(x, *others)
    return mixer.recurrence(x, call), call


@dataclass(frozen=True)
class Forms:
    """Relative errors (values, gradients) of each way of running a mixer against single steps."""

    mixer: str
    tolerance: float
    errors: dict[str, tuple[float, float]]

    @property
    def agree(self) -> bool:
        return all(error <= self.tolerance for pair in self.errors.values() for error in pair)  # false for NaN

    def __str__(self) -> str:
        rows = [f"{way:<24}{value:>10.1e}{gradient:>12.1e}" for way, (value, gradient) in self.errors.items()]
        return "\n".join([f"{self.mixer:<24}{'values':>10}{'gradients':>12}", *rows])


def check_forms(mixer: Mixer, x: Tensor | None = None, *, tolerance: float = 1e-9, seed: int = 0) -> Forms:
    """Check in float64 that a mixer gives the same values and gradients however it is run.

    One pass in every form of the recurrence (parallel, chunk, recurrent) and in pieces with the state passed on are compared
    with single steps: outputs, the last state, and the gradients of both for the tokens and every parameter.

    Args:
        mixer: any mixer; it is copied and not changed.
        x: tokens [B, T, D]; random ones [2, 100, D] if None.
        tolerance: the largest relative error.
        seed: for the random tokens and for the incoming gradients.

    Raises:
        AssertionError: with the table of errors, if one exceeds ``tolerance``, or if the shapes of the last state depend on the pieces.
        ValueError: if ``x`` has no tokens or the mixer is not causal, so that it has no steps to compare with.
    """
    whole("seed", seed, 0, 2**63 - 1)
    if not isinstance(tolerance, (int, float)) or not tolerance >= 0:
        raise ValueError(f"tolerance must be a number of at least 0, but came as {described(tolerance)}")
    if not isinstance(mixer, Mixer):
        raise TypeError(f"mixer must be a linattn.Mixer, but came as {described(mixer)}")
    if x is not None:
        mixer.check_width("x", x)
    if not mixer.causal:
        raise ValueError(f"mixer must be causal, but {type(mixer).__name__} has only a pass over all tokens")
    mixer = copy.deepcopy(mixer).double()
    if x is None:
        if mixer.dim is None:
            raise ValueError("x must be given for a mixer without the attribute dim")
        x = torch.randn(2, 100, mixer.dim, generator=torch.Generator().manual_seed(seed))
    if x.is_meta:
        raise ValueError("x must hold numbers, but is on meta")
    x = x.detach()
    x = x.to(next(mixer.parameters()).device, torch.float64).requires_grad_()
    tokens = x.shape[1]
    if tokens == 0:
        raise ValueError(f"x must hold at least one token, but came with {list(x.shape)}")
    wanted = _run(mixer, x, range(tokens + 1), seed)
    errors = {}
    for way, form, borders in _ways(mixer, tokens):
        mixer.form = form
        got = _run(mixer, x, borders, seed)
        if (shapes := _shapes(got[0])) != (steps := _shapes(wanted[0])):
            given = f"{way} gives {shapes}, single steps {steps}"
            raise AssertionError(f"the shapes of the last state of {type(mixer).__name__} depend on the pieces: {given}")
        errors[way] = (_distance(got[0].values(), wanted[0].values()), _distance(got[1], wanted[1]))
    report = Forms(type(mixer).__name__, tolerance, errors)
    if not report.agree:
        raise AssertionError(f"the forms do not agree to {tolerance:g}:\n{report}")
    return report


def _ways(mixer: Mixer, tokens: int) -> Iterator[tuple[str, Form, list[int]]]:
    """Iterate over ways to run a mixer: name, form of the recurrence, boundaries of the pieces."""
    if type(mixer).mix is Mixer.mix and type(mixer).attend is Mixer.attend:
        yield from ((form, form, [0, tokens]) for form in ("parallel", "chunk", "recurrent"))
    else:
        yield "one pass", "auto", [0, tokens]
    yield "two pieces", "auto", [0, tokens // 2, tokens]
    yield "uneven pieces", "auto", sorted({0, 1, min(4, tokens), tokens - tokens // 5, tokens})


def _run(mixer: Mixer, x: Tensor, borders: Sequence[int], seed: int) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Run the segments between ``borders``: outputs (named ``y:``) and last state, and the gradients of both along a random direction."""
    state: State = {}
    pieces = []
    for start, stop in pairwise(borders):
        y, state = mixer(x[:, start:stop], state or None, return_state=True)
        pieces.append(y)
    outputs = {"y:": torch.cat(pieces, 1), **{name: t for name, t in sorted(state.items()) if t.is_floating_point()}}
    generator = torch.Generator().manual_seed(seed + 1)
    directions = [torch.randn(o.shape, generator=generator, dtype=o.dtype).to(o.device) for o in outputs.values()]
    leaves = [x, *(p for p in mixer.parameters() if p.requires_grad)]
    return outputs, list(torch.autograd.grad(list(outputs.values()), leaves, directions, allow_unused=True, materialize_grads=True))


def _shapes(outputs: dict[str, Tensor]) -> dict[str, list[int]]:
    """Shape of each tensor of the state."""
    return {name: list(t.shape) for name, t in outputs.items() if name != "y:"}


def _distance(got: Iterable[Tensor], wanted: Iterable[Tensor]) -> float:
    """Largest ‖got − wanted‖ / ‖wanted‖; 0 if both are 0."""
    errors = [0.0]
    for a, b in zip(got, wanted, strict=True):
        size = b.norm()
        errors.append(((a - b).norm() / torch.where(size > 0, size, 1.0)).item())
    return max(errors, key=lambda error: math.inf if math.isnan(error) else error)
