"""Chunked form of the recurrence on a GPU for rows that several processes share: each has one part of every row.

Kernels fold the segments of a part into its state from an empty start and its link. One all-gather distributes them, and the kernels of
:mod:`linattn.ops.triton.chunks` continue from the state before the part; in the backward pass likewise with cotangents.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor

from linattn.ops.triton import fitting, launch
from linattn.ops.triton.chunks import backward_name, finished, forward_name, gradients_from, joining, kept_states, laid_out
from linattn.ops.triton.plan import PLAIN
from linattn.ops.triton.run import Arguments, Run, in_rows, side_by_side

GIVEN = len(Arguments._fields)


class Sizes(NamedTuple):
    """Shapes of the states and links of a part, one for each row."""

    state: tuple[int, ...]  # [B, H, K, V]
    link: tuple[int, ...]  # [B, H, K], or [B, H, K, K] if the rule erases

    @property
    def numbers(self) -> tuple[int, int]:
        return torch.Size(self.state).numel(), torch.Size(self.link).numel()


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
    """Output [B, T, H, V] of this part, the state after all parts (None unless ``last``), and three tensors for the backward pass.

    These are the states and links between segments, and the links of the later parts. The arguments are those of
    :data:`linattn.ops.recurrence.PARTS`.
    """
    *tensors, scale, wide, last, group, _ = arguments
    given = Arguments(*tensors)
    laid, sizes = laid_out(*tensors), _sizes(given)
    folded = given.v.new_empty(sum(sizes.numbers), dtype=torch.float32)
    o, starts, links, *prepared = launch.run(_fold, given.v, (*laid, folded), scale, wide)
    states, passages = group.gather(folded)().split(sizes.numbers, 1)
    states, passages = states.unflatten(1, sizes.state), passages.unflatten(1, sizes.link)
    pairs, rank = list(zip(states, passages, strict=True)), group.rank
    before = _folded(pairs[:rank], given.initial)
    launch.run(_outputs, given.v, (*laid, before, o, starts, links, *prepared), scale)
    return o, _folded(pairs[rank:], before) if last else None, starts, links, passages[rank + 1 :].clone()


def _folded(pairs: Sequence[tuple[Tensor, Tensor]], state: Tensor | None) -> Tensor | None:
    """State after parts, each with its state [B, H, K, V] from an empty start and its link, from the ``state`` before; None is 0."""
    for piece, link in pairs:
        if state is None:
            state = piece
        elif link.ndim < piece.ndim:
            state = torch.addcmul(piece, link[..., None], state)
        else:  # in float64, which no GPU rounds to TF32
            state = piece + (link.double() @ state.double()).float()
    return state


def _fold(recorder: launch.Recorder, *arguments: Any) -> launch.Tensors:
    """Write ``folded``; returns room for the output, the segments' own states and links, and what is prepared."""
    *tensors, folded, scale, wide = arguments
    run = Run(recorder, Arguments(*tensors), scale)
    o = run.empty(*run.own, run.size_v, dtype=torch.float32 if wide else run.v.dtype)
    erases = run.family.rule != PLAIN
    starts = run.empty(run.plan.segments, *run.state, dtype=torch.float32)
    links = run.empty(run.plan.segments, run.heads, run.size_k, *[run.size_k] * erases, dtype=torch.float32)
    run.choose(o)
    run.prepare()
    run.forward(starts, **joining(run, links), local=True, every=True)
    run.fold(starts, **joining(run, links), folded=folded, reverse=False)
    return o, starts, links, *run.prepared


def _outputs(recorder: launch.Recorder, *arguments: Any) -> launch.Tensors:
    """Write the output, and in ``starts`` the states before segments."""
    *tensors, scale = arguments
    before, o, starts, links, *prepared = tensors[GIVEN:]
    run = Run(recorder, Arguments(*tensors[:GIVEN]), scale)
    run.choose(o)
    run.reuse(tuple(prepared))
    run.chain(starts, **joining(run, links), first=before, reverse=False)
    run.forward(starts, o=o)
    return ()


@_remembers(backward_name)
def backward(do: Tensor, dfinal: Tensor | None, *arguments: Any) -> launch.Tensors:
    """Gradients of q, k, v, decay, beta, read, write, bonus and the initial state; the last is zero in all processes but the first.

    The arguments are those of :data:`linattn.ops.recurrence.PARTS`.
    """
    *tensors, scale, ddecay, last, group, starts, links, passages = arguments
    given, laid, do = Arguments(*tensors), laid_out(*tensors), in_rows(side_by_side(do))
    sizes = _sizes(given)
    count = sizes.numbers[0]
    sent = do.new_empty(count * (1 + last), dtype=torch.float32)  # the cotangent before this part, and that of the final state
    if last:
        sent[count:] = 0.0 if dfinal is None else dfinal.flatten()
    ends, *prepared = launch.run(_fold_back, given.v, (*laid, do, starts, links, sent[:count]), scale)
    received = group.gather(sent)
    kept = launch.run(_kept, given.v, (*laid, do, starts, *prepared), scale, ddecay)  # while the cotangents are on their way
    gathered = received()
    after = gathered[:, count:].sum(0).view(sizes.state) if last else None
    own = gathered[group.rank + 1 :, :count].unflatten(1, sizes.state)
    pairs = list(zip(own, passages if passages.ndim < own.ndim else passages.mT, strict=True))
    after = _folded(pairs[::-1], after)
    found = launch.run(_gradients, given.v, (*laid, do, after, starts, links, ends, *kept, *prepared), scale, ddecay)
    *others, dinitial = finished(given, found)
    return *others, dinitial if group.rank == 0 else torch.zeros_like(dinitial)


def _fold_back(recorder: launch.Recorder, *arguments: Any) -> launch.Tensors:
    """Write the cotangent ``folded`` before this part; returns the segments' own cotangents and what is prepared."""
    *tensors, do, starts, links, folded, scale = arguments
    run = Run(recorder, Arguments(*tensors), scale)
    run.choose(do)
    run.prepare()
    ends = run.empty(*starts.shape, dtype=torch.float32)
    run.backward(do, ends, local=True, every=True)
    run.fold(ends, **joining(run, links), folded=folded, reverse=True)
    return ends, *run.prepared


def _kept(recorder: launch.Recorder, *arguments: Any) -> launch.Tensors:
    *tensors, scale, ddecay = arguments
    do, starts, *prepared = tensors[GIVEN:]
    run = Run(recorder, Arguments(*tensors[:GIVEN]), scale)
    run.choose(do)
    run.reuse(tuple(prepared))
    return kept_states(run, starts, ddecay)


def _gradients(recorder: launch.Recorder, *arguments: Any) -> launch.Tensors:
    *tensors, scale, ddecay = arguments
    do, after, starts, links, ends, values, states, *prepared = tensors[GIVEN:]
    run = Run(recorder, Arguments(*tensors[:GIVEN]), scale)
    run.choose(do)
    run.reuse(tuple(prepared))
    run.chain(ends, **joining(run, links), first=after, reverse=True)
    return gradients_from(run, do, starts, ends, (values, states), ddecay)
