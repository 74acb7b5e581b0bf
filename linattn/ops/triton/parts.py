"""Chunked form of the recurrence on a GPU for rows split over several processes: each has one part of every row.

Kernels fold the segments of a part into its state from an empty start and its link. One all-gather distributes them, and the kernels of
:mod:`linattn.ops.triton.chunks` continue from the state before the part; in the backward pass likewise with cotangents.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor

from linattn.ops.triton import fitting, launch
from linattn.ops.triton.arguments import Arguments, in_rows, side_by_side
from linattn.ops.triton.chunks import (
    backward_name,
    finished,
    forward_name,
    gradients_from,
    joining,
    kept_states,
    laid_out,
    prepare,
)
from linattn.ops.triton.plan import PLAIN
from linattn.ops.triton.run import Run

INITIAL = Arguments._fields.index("initial")


class Sizes(NamedTuple):
    """Shapes of the states and links of a part, one for each row."""

    state: tuple[int, ...]  # [B, H, K, V]
    link: tuple[int, ...]  # [B, H, K], or [B, H, K, K] if the rule erases

    @property
    def states(self) -> int:
        """Numbers of the states."""
        return math.prod(self.state)

    @property
    def numbers(self) -> int:
        """Numbers of states and links."""
        return self.states + math.prod(self.link)


def _sizes(given: Arguments) -> Sizes:
    batch, _, heads, size_v = given.v.shape
    size_k, erases = given.k.shape[3], given.beta is not None or given.read is not None
    return Sizes((batch, heads, size_k, size_v), (batch, heads, size_k, *[size_k] * erases))


def _remembers(name: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a pass so that later calls are refused once a kernel did not fit."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def run(*arguments: Any) -> Any:
            try:
                return function(*arguments)
            except fitting.Unfit as error:
                fitting.remember(name(*arguments), error)
                raise

        return run

    return decorate


@_remembers(forward_name)
def forward(*arguments: Any) -> launch.Tensors:
    """Output [B, T, H, V] of this part, the state after all parts (None unless ``last``), and nine tensors for the backward pass.

    These are the states and links between segments, the links of the later parts, and what was prepared of the chunks, see
    :func:`linattn.ops.triton.chunks.forward`. The arguments are those of :data:`linattn.ops.recurrence.PARTS`.
    """
    *tensors, scale, wide, last, group, keeps = arguments
    given, rank = Arguments(*tensors), group.rank
    laid, sizes = laid_out(*tensors), _sizes(given)
    folded, initial = _allocate(given, sizes.numbers), laid[INITIAL]
    before = _states(given, sizes) if group.joined else initial
    found: list[Tensor] = []

    def exchange() -> None:
        if rank > 0 and not group.passes:
            folded[sizes.states :] = 0.0
        found.append(group.gather(folded)())
        if group.joined:
            _fold(sizes, found[0][:rank], initial, before[: sizes.state[0]])

    o, starts, links, *kept = launch.run(_forward, given.v, (*laid, before, folded), scale, wide, keeps, pauses=(exchange,))
    final = _fold(sizes, found[0][rank:], before, _allocate(given, *sizes.state)) if last else None
    return o, final, starts, links, found[0][rank + 1 :, sizes.states :].clone(), *kept


def _allocate(given: Arguments, *shape: int) -> Tensor:
    return given.v.new_empty(shape, dtype=torch.float32)


def _states(given: Arguments, sizes: Sizes) -> Tensor:
    """States of all sequences of this part: of packed ones, zeros."""
    if given.cu is None:
        return _allocate(given, *sizes.state)
    return given.v.new_zeros(len(given.cu) - 1, *sizes.state[1:], dtype=torch.float32)


def _fold(sizes: Sizes, parts: Tensor, state: Tensor | None, out: Tensor, links: Tensor | None = None) -> Tensor:
    """Write to ``out`` the state after ``parts`` [parts, numbers], in turn, from ``state`` before them; None is 0.

    The numbers are a part's state from an empty start and its link. With ``links`` they are a part's cotangent, and the parts pass that of
    the state after them on to the one before.
    """
    for i in range(len(parts)) if links is None else reversed(range(len(parts))):
        own = parts[i, : sizes.states].view(sizes.state)
        if state is None:
            state = own
            continue
        link = (parts[i, sizes.states :] if links is None else links[i]).view(sizes.link)
        if link.ndim < own.ndim:
            state = torch.addcmul(own, link[..., None], state)
        else:  # in float64, which is never rounded to TF32
            state = own + ((link if links is None else link.mT).double() @ state.double()).float()
    assert state is not None
    return out.copy_(state)


def _forward(recorder: launch.Recorder, *arguments: Any) -> launch.Tensors:
    *tensors, before, folded, scale, wide, keeps = arguments
    run = Run(recorder, Arguments(*tensors), scale)
    o = run.empty(*run.own, run.size_v, dtype=torch.float32 if wide else run.v.dtype)
    square = run.family.rule != PLAIN
    starts = run.empty(run.plan.segments, *run.state, dtype=torch.float32)
    links = run.empty(run.plan.segments, run.heads, run.size_k, *[run.size_k] * square, dtype=torch.float32)
    run.local = True
    run.choose(o)
    kept = prepare(run, keeps, o)
    run.forward(starts, **joining(run, links), local=True, every=True)
    run.fold(starts, **joining(run, links), folded=folded, reverse=False)
    recorder.pause()
    run.chain(starts, **joining(run, links), first=before, reverse=False)
    run.forward(starts, o=o)
    return o, starts, links, *kept


@_remembers(backward_name)
def backward(do: Tensor, dfinal: Tensor | None, *arguments: Any) -> launch.Tensors:
    """Gradients of q, k, v, decay, beta, read, write, bonus and the initial state; the last is zero in all processes but the first.

    The arguments are those of :data:`linattn.ops.recurrence.PARTS`.
    """
    *tensors, scale, ddecay, last, group, starts, links, passages = arguments[:-6]
    given, rank = Arguments(*tensors), group.rank
    sizes = _sizes(given)
    count = sizes.states
    sent = _allocate(given, count * (1 + last))  # the cotangent before this part, and that of the final state
    if last:
        sent[count:] = 0.0 if dfinal is None else dfinal.flatten()
    folded, after = sent[:count], _states(given, sizes) if last or rank < group.ranks - 1 else None
    received: list[Callable[[], Tensor]] = []

    def send() -> None:
        if rank > 0 and not group.joined:
            folded.zero_()
        received.append(group.gather(sent))

    def receive() -> None:
        gathered = received[0]()
        if after is not None:
            of_final = gathered[:, count:].sum(0).view(sizes.state) if last else None
            _fold(sizes, gathered[rank + 1 :], of_final, after[-sizes.state[0] :], passages)

    laid = (*laid_out(*tensors), in_rows(side_by_side(do)))
    saved = (starts, links, *arguments[-6:])
    found = launch.run(_backward, given.v, (*laid, after, *saved, folded), scale, ddecay, pauses=(send, receive))
    *others, dinitial = finished(given, found)
    return *others, dinitial if rank == 0 or given.initial is None else torch.zeros_like(dinitial)


def _backward(recorder: launch.Recorder, *arguments: Any) -> launch.Tensors:
    *tensors, do, after, starts, links = arguments[:-9]
    *kept, folded, scale, ddecay = arguments[-9:]
    run = Run(recorder, Arguments(*tensors), scale)
    run.local = True
    run.choose(do)
    dk = run.empty(*run.own, run.size_k) if run.in_place else None
    run.prepare(dk, kept, ddecay)
    ends = run.empty(*starts.shape, dtype=torch.float32)
    run.backward(do, ends, local=True, every=True)
    run.fold(ends, **joining(run, links), folded=folded, reverse=True)
    recorder.pause()
    states = kept_states(run, starts, ddecay, None if run.p is dk else dk)  # overlaps with the exchange of cotangents
    recorder.pause()
    run.chain(ends, **joining(run, links), first=after, reverse=True)
    return gradients_from(run, do, starts, ends, states, ddecay, dk)
