"""Chunked form of the recurrence on a GPU: the kernels of a forward and a backward pass."""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from linattn.ops.inputs import Flat
from linattn.ops.triton import fitting, launch
from linattn.ops.triton.arguments import Arguments, in_rows, side_by_side
from linattn.ops.triton.plan import DELTA, ERASE, PLAIN
from linattn.ops.triton.run import Run

WIDEST = 256  # largest key size of a kernel call; larger ones are split unless the rule erases


def name(
    of: str, k: Tensor, v: Tensor, per_channel: bool, lasting: bool, beta: Tensor | None, read: Tensor | None, bonus: Tensor | None
) -> Hashable:
    """Key of a pass in the record of kernels that do not fit; calls that differ only in batch and length share it."""
    sizes = min(k.shape[3], WIDEST), v.shape[3]
    return of, v.device, v.dtype, sizes, per_channel, lasting, beta is None, read is None, bonus is None


def forward_name(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    beta: Tensor | None,
    read: Tensor | None,
    write: Tensor | None,
    bonus: Tensor | None,
    *rest: object,
    **options: object,
) -> Hashable:
    return name("forward", k, v, decay is not None and decay.ndim == 4, decay is None, beta, read, bonus)


def backward_name(do: Tensor, dfinal: Tensor | None, q: Tensor, *tensors: Any) -> Hashable:
    return ("backward", *forward_name(q, *tensors)[1:])  # type: ignore[index]


def portable_forward(*arguments: Any, **options: bool) -> launch.Tensors:
    """Compute :func:`forward` in operations of torch, without what it saves for the backward pass."""
    from linattn.ops.torch import linear_attention as portable

    call, wide = Flat(*(*arguments[:9], None, *arguments[9:11], False)), arguments[11]
    out = portable.FORMS["chunk"](call.inputs())
    return out.o if wide else out.o.to(call.v.dtype), out.state, *(None,) * 8


@fitting.or_else(portable_forward, forward_name)
def forward(*arguments: Any, reuse: bool = True) -> launch.Tensors:
    """Output [B, T, H, V] (float32 if ``wide``), final state, and what is saved for the backward pass, None where it does not need it.

    These are the states and links between segments and, with ``reuse``, what was prepared of the chunks:
    :attr:`linattn.ops.triton.call.Call.prepared`, unless :meth:`~linattn.ops.triton.call.Call.unkept` has a reason. The arguments are
    those of ``linattn::chunk_forward``.
    """
    *tensors, scale, wide, keeps = arguments
    then = _likely_backward if keeps else None
    return launch.run(_forward, tensors[2], laid_out(*tensors), scale, wide, keeps, keeps and reuse, then=then)


def recorded(*arguments: Any) -> launch.Tensors:
    """:func:`forward` in a compiled graph, which has shapes but no addresses, on which keeping the prepared chunks depends."""
    return forward(*arguments, reuse=False)


def _likely_backward(recorder: launch.Recorder, results: launch.Tensors, *arguments: Any) -> None:
    """The backward pass that follows, unless the final state has a cotangent."""
    *tensors, scale, _, _, _ = arguments
    o, _, *saved = results
    decay = Arguments(*tensors).decay
    traced = not any(t is not None and t.requires_grad for t in tensors)  # in a compiled graph requires_grad is unknown
    _backward(recorder, *tensors, o, None, *saved, scale, decay is not None and (traced or decay.requires_grad))


def laid_out(*tensors: Any) -> launch.Tensors:
    """The tensors of ``linattn::chunk_forward`` in the memory layout of the kernels."""
    q, k, v, *timed, bonus, initial, cu = tensors
    return *map(in_rows, (q, k, side_by_side(v), *timed)), *(None if t is None else t.contiguous() for t in (bonus, initial, cu))


def _forward(recorder: launch.Recorder, *arguments: Any) -> launch.Tensors:
    *tensors, scale, wide, keeps, reuse = arguments
    given = Arguments(*tensors)
    run = Run(recorder, given, scale)
    made: list[Any] = [None if shape is None else run.empty(*shape, dtype=dtype) for shape, dtype in _shapes(run, wide)]
    o, final, starts, links = made
    run.choose(o)
    kept = prepare(run, reuse, o)
    if starts is not None:
        run.forward(starts, **joining(run, links), local=True, every=keeps)
        run.chain(starts, **joining(run, links), first=given.initial, reverse=False)
    run.forward(given.initial if starts is None else starts, o=o, final=final)
    return o, final, starts, links, *kept


def prepare(run: Run, reuse: bool, spare: Tensor | None = None) -> launch.Tensors:
    """Prepare the chunks; returns what the backward pass can ``reuse``, if it is kept. Otherwise it may alias ``spare``."""
    keeps = reuse and run.unkept() is None
    run.prepare(None if keeps else spare)
    return run.prepared if keeps else (None,) * 6


def _shapes(run: Run, wide: bool) -> tuple[tuple[tuple[int, ...] | None, torch.dtype], ...]:
    """Shapes of the results of a forward pass."""
    starts = links = None
    if run.plan.split:
        starts = (run.plan.segments, *run.state)
        links = (run.plan.segments, run.heads, run.size_k, *(() if run.family.rule == PLAIN else (run.size_k,)))
    o = torch.float32 if wide else run.v.dtype
    return ((*run.own, run.size_v), o), ((run.sequences, *run.state), torch.float32), (starts, torch.float32), (links, torch.float32)


def joining(run: Run, links: Tensor | None) -> dict[str, Tensor | None]:
    """Links between segments: transitions [segments, H, K, K] where the rule erases, else remaining decays [segments, H, K]."""
    plain = run.family.rule == PLAIN
    return {"transition": None if plain else links, "total": links if plain else None}


def portable_backward(do: Tensor, dfinal: Tensor | None, *arguments: Any) -> launch.Tensors:
    """Compute :func:`backward` in operations of torch."""
    *tensors, scale, ddecay = arguments[:-8]

    def run(*given: Tensor | None) -> launch.Tensors:
        return portable_forward(*given, tensors[9], scale, do.dtype == torch.float32)[:2]

    if tensors[8] is None:  # the kernels return the gradient of an empty initial state too
        sequences = do.shape[0] if tensors[9] is None else tensors[9].shape[0] - 1
        tensors[8] = do.new_zeros(sequences, do.shape[2], tensors[1].shape[3], do.shape[3], dtype=torch.float32)
    dq, dk, dv, decay, *others = fitting.differentiated(run, tuple(tensors[:9]), (do, dfinal))
    return dq, dk, dv, decay if ddecay else None, *others


@fitting.or_else(portable_backward, backward_name)
def backward(do: Tensor, dfinal: Tensor | None, *arguments: Any) -> launch.Tensors:
    """Gradients of q, k, v, decay, beta, read, write, bonus and the initial state.

    The arguments are those of ``linattn::chunk_backward``.
    """
    *tensors, scale, ddecay, starts, links = arguments[:-6]
    if fitting.refusal(forward_name(*tensors)):  # the forward pass has saved nothing then
        return portable_backward(do, dfinal, *arguments)
    given = Arguments(*tensors)
    dfinal = None if dfinal is None else dfinal.contiguous()
    saved = (starts, links, *(t if t is not None and t.numel() else None for t in arguments[-6:]))
    found = launch.run(_backward, given.v, (*laid_out(*tensors), in_rows(side_by_side(do)), dfinal, *saved), scale, ddecay)
    return finished(given, found)


def finished(given: Arguments, found: launch.Tensors) -> launch.Tensors:
    """Gradients in the dtypes of the arguments, from those of the kernels."""
    dq, dk, dv, *others, dbonus, dinitial = found
    if given.bonus is not None:
        dbonus = dbonus.unflatten(1, (given.v.shape[2], -1)).sum((0, 2)).to(given.bonus.dtype)
    return dq, dk, dv.to(given.v.dtype), *others, dbonus, dinitial


def _backward(recorder: launch.Recorder, *arguments: Any) -> launch.Tensors:
    *tensors, do, dfinal, starts, links = arguments[:-8]
    *kept, scale, ddecay = arguments[-8:]
    given = Arguments(*tensors)
    run = Run(recorder, given, scale)
    run.choose(do)
    dk = run.empty(*run.own, run.size_k) if run.in_place else None
    run.prepare(dk, kept, ddecay)
    ends = dfinal
    if run.plan.split:
        ends = run.empty(*starts.shape, dtype=torch.float32)
        run.backward(do, ends, local=True)
        run.chain(ends, **joining(run, links), first=dfinal, reverse=True)
    before = starts if run.plan.split else given.initial
    return gradients_from(run, do, before, ends, kept_states(run, before, ddecay, None if run.p is dk else dk), ddecay, dk)


def kept_states(run: Run, before: Tensor | None, ddecay: bool, spare: Tensor | None = None) -> tuple[Tensor | None, ...]:
    """Values that the keys write, the states before the chunks, and memory for the gradient of v, from the states ``before`` segments.

    ``spare`` is unused memory for the gradient of k, or None.
    """
    if run.exchanges and not ddecay:
        return None, None, None
    values = run.empty(*run.own, run.size_v) if run.family.rule != PLAIN else None
    dv = run.empty(*run.own, run.size_v, dtype=run.dtype if run.family.rule == DELTA else run.v.dtype)
    lends = run.fuses(ddecay) and run.aligned
    if not lends:
        states = run.empty(run.plan.chunks, *run.state)
    else:  # half of each state where the gradient of v will be
        states = run.empty(*run.own, run.size_v) if spare is None else spare
    run.forward(before, values=values, states=states, early=dv if lends else None)
    return values, states, dv


def gradients_from(
    run: Run, do: Tensor, before: Tensor | None, ends: Tensor | None, kept: tuple[Tensor | None, ...], ddecay: bool, dk: Tensor | None
) -> launch.Tensors:
    """Gradients from the states ``before`` segments, the cotangents ``ends`` after them, and :func:`kept_states`."""
    v, rule, (values, states, dv) = run.v, run.family.rule, kept
    dinitial = run.empty(run.sequences, *run.state, dtype=torch.float32)
    if states is None:
        dq, dk = (run.empty(*run.own, run.size_k, dtype=v.dtype) for _ in "qk")
        dv = run.empty(*run.own, run.size_v, dtype=v.dtype)
        run.backward(do, ends, dv, dinitial=dinitial)
        turned = run.exchanged(do)
        turned.backward(run.q, ends, dk)
        turned.forward(before, o=dq)
        return dq, dk, dv, None, None, None, None, None, dinitial
    x_read = run.empty(*run.own, run.size_v) if rule == ERASE else None
    if run.fuses(ddecay):
        dq, dk, *others = run.fused(do, ends, (values, states, dv), dinitial, ddecay, dk)
        return dq, dk, dv, *others, dinitial
    part = run.part(ddecay)
    dstates = run.empty(run.plan.segments * part or run.plan.chunks, *run.state)
    scan = partial(run.backward, do, ends, dv, x_read, dstates, dinitial)
    if not part:
        scan()
    kept = (values, dv if rule == DELTA else x_read, states, dstates)
    dq, dk, *others = run.gradients(do, kept, ddecay, dk, of_part=scan if part else None)
    return dq, dk, dv, *others, dinitial


def outputs(*arguments: Any) -> launch.Tensors:
    """The results of :func:`forward` without memory."""
    *tensors, scale, wide, _ = arguments
    v = tensors[2]
    run = Run(launch.Recorder(v, ()), Arguments(*tensors), scale)
    return *(None if shape is None else v.new_empty(shape, dtype=dtype) for shape, dtype in _shapes(run, wide)), *(None,) * 6


def gradients(do: Tensor, dfinal: Tensor | None, *arguments: Any) -> launch.Tensors:
    """Empty gradients, as :func:`backward` returns them, for fake results of operators."""
    *tensors, _, ddecay = arguments[:-8]
    x = Arguments(*tensors)
    sequences = x.v.shape[0] if x.cu is None else x.cu.shape[0] - 1
    dinitial = x.v.new_empty((sequences, x.v.shape[2], x.k.shape[3], x.v.shape[3]), dtype=torch.float32)
    of = (x.q, x.k, x.v, x.decay if ddecay else None, x.beta, x.read, x.write, x.bonus)
    return *(None if t is None else t.new_empty(t.shape) for t in of), dinitial
