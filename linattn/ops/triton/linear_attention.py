"""The GPU backend of the recurrence: what it refuses, the kernels of a forward and a backward pass, and their operators."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import replace

import torch
from torch import Tensor

from linattn.ops import gpu, tracing
from linattn.ops.inputs import Inputs, Outputs
from linattn.ops.triton import decode, fitting, hopper, launch
from linattn.ops.triton.hopper import choice as choice_of_hopper
from linattn.ops.triton.plan import CHANNEL, DELTA, ERASE, HEAD, NONE, PLAIN
from linattn.ops.triton.run import Arguments, Run, in_rows, side_by_side

STEPS = 16  # tokens that steps are faster for than chunks
WIDEST = 256  # keys of one call of the kernels; without a rule that erases more go in parts


def refusal(inputs: Inputs, form: str) -> str | None:
    """Why the kernels do not run ``inputs``, or None if they do."""
    if inputs.v.dtype == torch.float64:
        return "it computes in float32 at most, and the inputs are float64"
    if (reason := tracing.refusal()) is not None:
        return reason
    if form == "parallel":
        return "it has no quadratic form"
    if not inputs.causal:
        return "without causality one matrix product is the whole work"
    if inputs.v.shape[1] == 0 or inputs.rows == 0 or inputs.v.shape[0] == 0:
        return "there are no tokens"
    if form_of(inputs, form) == "recurrent":
        return decode.refusal(inputs)
    erasing = inputs.beta is not None or inputs.erase is not None
    widest = WIDEST if erasing else 2 * WIDEST
    if max(inputs.k.shape[3], inputs.v.shape[3]) > widest:
        what = "with beta or erase" if erasing else "without beta and erase"
        return f"{what} it takes K and V up to {widest}, but they are {inputs.k.shape[3]} and {inputs.v.shape[3]}"
    read = inputs.erase[0] if inputs.erase else None
    kinds = (inputs.k, inputs.v, inputs.decay_per_channel, inputs.decay is None, inputs.beta, read, inputs.bonus)
    passes = ("forward", "backward") if wants_gradients(inputs) else ("forward",)
    return fitting.refusal(*(_name(name, *kinds) for name in passes))


def wants_gradients(x: Inputs) -> bool:
    return tracing.wanted(*x.differentiable)


def _name(of: str, k, v, per_channel: bool, lasting: bool, beta, read, bonus) -> Hashable:
    """What one pass of calls that differ in batch and length alone is remembered by, where a kernel of it does not fit."""
    sizes = min(k.shape[3], WIDEST), v.shape[3]
    return of, v.device, v.dtype, sizes, per_channel, lasting, beta is None, read is None, bonus is None


def _forward_name(q, k, v, decay, beta, read, write, bonus, *rest) -> Hashable:
    return _name("forward", k, v, decay is not None and decay.ndim == 4, decay is None, beta, read, bonus)


def _backward_name(do, dfinal, q, *tensors) -> Hashable:
    return ("backward", *_forward_name(q, *tensors)[1:])  # type: ignore[index]


def form_of(inputs: Inputs, form: str) -> str:
    """The form that ``auto`` takes: steps for a few tokens that nobody wants gradients of, else chunks."""
    if form != "auto":
        return form
    return "recurrent" if inputs.v.shape[1] <= STEPS and decode.refusal(inputs) is None else "chunk"


def off(inputs: Inputs, form: str) -> list[str]:
    """What ``inputs`` would be faster by and have not, for ``explain``: a line for each, with the reason."""
    device, lines = inputs.v.device, launch.off(inputs.v.device)
    if device.type != "cuda" or form_of(inputs, form) != "chunk" or gpu.capability(device) != (9, 0):
        return lines
    rank = NONE if inputs.decay is None else CHANNEL if inputs.decay_per_channel else HEAD
    rule = DELTA if inputs.beta is not None else PLAIN if inputs.erase is None else ERASE
    sizes, own = (inputs.k.shape[3], inputs.v.shape[3]), (inputs.erase or (None, None))[1] if rank != CHANNEL else None
    laid_out = (in_rows(t) for t in (side_by_side(inputs.v), inputs.q, inputs.k, own))
    reason = hopper.gluon_refusal(device) or hopper.unsuited(sizes, *laid_out)
    if reason is not None:
        return [*lines, f"hopper kernels: off, because {reason}"]
    if (reason := choice_of_hopper.distrusted(rule, rank)) is not None:
        lines.append(f"hopper kernels: off for the gradients of chunks, because {reason}")
    return lines


def chunked(inputs: Inputs) -> Outputs:
    """Run ``inputs`` in chunks; differentiable once."""
    o, state = _wide_keys(inputs, inputs.v, inputs.initial, inputs.denominator)
    if not inputs.denominator:
        return Outputs(o, None, state, None)
    # z is a state with one column that every token writes a 1 into.
    ones = inputs.v.new_ones(()).expand(*inputs.v.shape[:3], 1)
    initial = None if inputs.initial_z is None else inputs.initial_z[..., None]
    below, z = _wide_keys(inputs, ones, initial, True)
    return Outputs(o, below[..., 0], state, z[..., 0])


def _wide_keys(x: Inputs, v: Tensor, initial: Tensor | None, wide: bool) -> tuple[Tensor, Tensor]:
    """The channels of keys are independent where nothing erases, so many of them go in parts that add up."""
    size = x.k.shape[3]
    if size <= WIDEST:
        return _call(x, v, initial, wide)
    parts = [slice(a, min(a + WIDEST, size)) for a in range(0, size, WIDEST)]
    results = [_call(_channels(x, part), v, None if initial is None else initial[:, :, part], True) for part in parts]
    o = torch.stack([o for o, _ in results]).sum(0)
    return o if wide else o.to(v.dtype), torch.cat([state for _, state in results], 2)


def _channels(x: Inputs, part: slice) -> Inputs:
    decay = x.decay[..., part] if x.decay is not None and x.decay_per_channel else x.decay
    return replace(x, q=x.q[..., part], k=x.k[..., part], decay=decay, bonus=None if x.bonus is None else x.bonus[:, part])


def _call(x: Inputs, v: Tensor, initial: Tensor | None, wide: bool) -> tuple[Tensor, Tensor]:
    decay = x.decay
    if decay is not None and x.decay_constant:
        decay = decay.float().expand(*v.shape[:2], *decay.shape)
    read, write = x.erase or (None, None)
    keeps = wants_gradients(x)
    arguments = (x.q, x.k, v, decay, x.beta, read, write, x.bonus, initial, x.cu_seqlens, x.scale, wide, keeps)
    if tracing.traced(v, *x.differentiable):
        o, state, *_ = chunk_forward(*arguments)
    else:
        o, state, *_ = Chunks.apply(*arguments) if keeps else forward(*arguments)
    return o, state


def portable_forward(*arguments) -> launch.Tensors:
    """``forward`` in operations of torch; nothing joins segments."""
    from linattn.ops.torch import linear_attention as portable

    q, k, v, decay, beta, read, write, bonus, initial, cu, scale, wide, *_ = arguments
    erase = None if read is None else (read, write)
    out = portable.FORMS["chunk"](Inputs(q, k, v, scale, decay, beta, erase, bonus, initial=initial, return_state=True, cu_seqlens=cu))
    return out.o if wide else out.o.to(v.dtype), out.state, None, None


@fitting.or_else(portable_forward, _forward_name)
def forward(*arguments) -> launch.Tensors:
    """Output [B, T, H, V] (float32 if ``wide``), final state, and, between segments, states and what joins them (or None).

    The arguments are those of ``chunk_forward``.
    """
    *tensors, scale, wide, keeps = arguments
    return launch.run(_forward, tensors[2], _laid_out(*tensors), scale, wide, keeps, then=_likely_backward if keeps else None)


def _likely_backward(recorder: launch.Recorder, results: launch.Tensors, *arguments) -> None:
    """The backward pass that follows unless the final state has a cotangent too."""
    *tensors, scale, _, _ = arguments
    o, _, starts, links = results
    decay = Arguments(*tensors).decay
    _backward(recorder, *tensors, o, None, starts, links, scale, decay is not None and decay.requires_grad)


def _laid_out(*tensors: Tensor | None) -> launch.Tensors:
    """The tensors of ``chunk_forward``, in the memory layout that the kernels want."""
    q, k, v, *timed, bonus, initial, cu = tensors
    return *map(in_rows, (q, k, side_by_side(v), *timed)), *(None if t is None else t.contiguous() for t in (bonus, initial, cu))


def _forward(recorder: launch.Recorder, *arguments) -> launch.Tensors:
    *tensors, scale, wide, keeps = arguments
    given = Arguments(*tensors)
    run = Run(recorder, given, scale)
    o, final, starts, links = (None if shape is None else run.empty(*shape, dtype=dtype) for shape, dtype in _shapes(run, wide))
    run.choose(o)
    run.prepare()
    if starts is not None:
        run.forward(starts, **_joining(run, links), local=True, every=keeps)
        run.chain(starts, **_joining(run, links), first=given.initial, reverse=False)
    run.forward(given.initial if starts is None else starts, o=o, final=final)
    return o, final, starts, links


def _shapes(run: Run, wide: bool) -> tuple[tuple[tuple[int, ...] | None, torch.dtype], ...]:
    """Of what a forward pass returns."""
    starts = links = None
    if run.plan.split:
        starts = (run.plan.segments, *run.state)
        links = (run.plan.segments, run.heads, run.size_k, *(() if run.family.rule == PLAIN else (run.size_k,)))
    o = torch.float32 if wide else run.v.dtype
    return ((*run.own, run.size_v), o), ((run.sequences, *run.state), torch.float32), (starts, torch.float32), (links, torch.float32)


def _joining(run: Run, links: Tensor | None) -> dict[str, Tensor | None]:
    """What joins segments: transitions [segments, H, K, K] where the rule erases, else what decays leave [segments, H, K]."""
    plain = run.family.rule == PLAIN
    return {"transition": None if plain else links, "total": links if plain else None}


def portable_backward(do: Tensor, dfinal: Tensor | None, *arguments) -> launch.Tensors:
    """``backward`` in operations of torch."""
    *tensors, scale, ddecay, _, _ = arguments

    def run(*given: Tensor | None) -> launch.Tensors:
        return portable_forward(*given, tensors[9], scale, do.dtype == torch.float32)[:2]

    if tensors[8] is None:  # the kernels give the gradient of a state of zeros too
        sequences = do.shape[0] if tensors[9] is None else tensors[9].shape[0] - 1
        tensors[8] = do.new_zeros(sequences, do.shape[2], tensors[1].shape[3], do.shape[3], dtype=torch.float32)
    dq, dk, dv, decay, *others = fitting.differentiated(run, tuple(tensors[:9]), (do, dfinal))
    return dq, dk, dv, decay if ddecay else None, *others


@fitting.or_else(portable_backward, _backward_name)
def backward(do: Tensor, dfinal: Tensor | None, *arguments) -> launch.Tensors:
    """Gradients of q, k, v, decay, beta, read, write, bonus and the initial state.

    The arguments are those of ``chunk_backward``.
    """
    *tensors, scale, ddecay, starts, links = arguments
    if fitting.refusal(_forward_name(*tensors)):  # whose kernels have left nothing
        return portable_backward(do, dfinal, *arguments)
    given = Arguments(*tensors)
    dfinal = None if dfinal is None else dfinal.contiguous()
    dq, dk, dv, *others, dbonus, dinitial = launch.run(
        _backward, given.v, (*_laid_out(*tensors), in_rows(side_by_side(do)), dfinal, starts, links), scale, ddecay
    )
    if given.bonus is not None:
        dbonus = dbonus.unflatten(1, (given.v.shape[2], -1)).sum((0, 2)).to(given.bonus.dtype)
    return dq, dk, dv.to(given.v.dtype), *others, dbonus, dinitial


def _backward(recorder: launch.Recorder, *arguments) -> launch.Tensors:
    *tensors, do, dfinal, starts, links, scale, ddecay = arguments
    given = Arguments(*tensors)
    run, v = Run(recorder, given, scale), given.v
    rule, slots = run.family.rule, run.plan.chunks
    run.choose(do)
    run.prepare()
    ends = dfinal
    if run.plan.split:
        ends = run.empty(*starts.shape, dtype=torch.float32)
        run.backward(do, ends, local=True)
        run.chain(ends, **_joining(run, links), first=dfinal, reverse=True)
    dinitial = run.empty(run.sequences, *run.state, dtype=torch.float32)
    if run.exchanges and not ddecay:
        dq, dk = (run.empty(*run.own, run.size_k, dtype=v.dtype) for _ in "qk")
        dv = run.empty(*run.own, run.size_v, dtype=v.dtype)
        run.backward(do, ends, dv, dinitial=dinitial)
        turned = run.exchanged(do)
        turned.backward(given.q, ends, dk)
        turned.forward(starts if run.plan.split else given.initial, o=dq)
        return dq, dk, dv, None, None, None, None, None, dinitial
    states, dstates = run.empty(slots, *run.state), run.empty(slots, *run.state)
    values = run.empty(*run.own, run.size_v) if rule != PLAIN else None
    x_read = run.empty(*run.own, run.size_v) if rule == ERASE else None
    dv = run.empty(*run.own, run.size_v, dtype=run.dtype if rule == DELTA else v.dtype)
    run.forward(starts if run.plan.split else given.initial, values=values, states=states)
    run.backward(do, ends, dv, x_read, dstates, dinitial)
    dq, dk, *others = run.gradients(do, (values, dv if rule == DELTA else x_read, states, dstates), ddecay)
    return dq, dk, dv, *others, dinitial


@torch.library.custom_op("linattn::chunk_forward", mutates_args=())
def chunk_forward(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, beta: Tensor | None, read: Tensor | None, write: Tensor | None,
    bonus: Tensor | None, initial: Tensor | None, cu_seqlens: Tensor | None, scale: float, wide: bool, keeps: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """``forward`` as an operator, with empty tensors for None; ``keeps``: gradients will be asked for."""
    return _given(v, forward(q, k, v, decay, beta, read, write, bonus, initial, cu_seqlens, scale, wide, keeps))


def _given(like: Tensor, tensors: Iterable[Tensor | None]) -> launch.Tensors:
    """Operators return tensors, empty ones for what there is not."""
    return tuple(like.new_empty((0,)) if t is None else t for t in tensors)


@chunk_forward.register_fake
def _(q, k, v, decay, beta, read, write, bonus, initial, cu_seqlens, scale, wide, keeps):
    run = Run(launch.Recorder(v, ()), Arguments(q, k, v, decay, beta, read, write, bonus, initial, cu_seqlens), scale)
    return _given(v, [None if shape is None else v.new_empty(shape, dtype=dtype) for shape, dtype in _shapes(run, wide)])


@torch.library.custom_op("linattn::chunk_backward", mutates_args=())
def chunk_backward(
    do: Tensor, dfinal: Tensor | None, q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, beta: Tensor | None, read: Tensor | None,
    write: Tensor | None, bonus: Tensor | None, initial: Tensor | None, cu_seqlens: Tensor | None, scale: float, ddecay: bool,
    starts: Tensor, links: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """``backward`` as an operator, with empty tensors for None."""
    return _given(v, backward(do, dfinal, q, k, v, decay, beta, read, write, bonus, initial, cu_seqlens, scale, ddecay, starts, links))


@chunk_backward.register_fake
def _(do, dfinal, q, k, v, decay, beta, read, write, bonus, initial, cu_seqlens, scale, ddecay, starts, links):
    sequences = v.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    dinitial = v.new_empty((sequences, v.shape[2], k.shape[3], v.shape[3]), dtype=torch.float32)
    of = (q, k, v, decay if ddecay else None, beta, read, write, bonus)
    return _given(v, [*(None if t is None else v.new_empty(t.shape, dtype=t.dtype) for t in of), dinitial])


def _keep(ctx, inputs, output):
    *tensors, scale, _, keeps = inputs
    if not keeps:
        raise RuntimeError("linattn::chunk_forward was told that nobody needs gradients; call linattn.linear_attention instead")
    ctx.save_for_backward(*tensors, *output[2:])
    ctx.scale = scale
    ctx.set_materialize_grads(False)


def _differentiate(ctx, do, dfinal, *_):
    *tensors, starts, links = ctx.saved_tensors
    v = tensors[2]
    if do is None:
        do = v.new_zeros(v.shape)
    seen = torch.is_grad_enabled() or tracing.traced(do, v)  # who asks for a second derivative gets the operator's refusal
    differentiate = chunk_backward if seen else backward
    grads = differentiate(do, dfinal, *tensors, ctx.scale, ctx.needs_input_grad[3], starts, links)
    wanted = [g if needed else None for g, needed in zip(grads, ctx.needs_input_grad[:9], strict=True)]
    return (*wanted, None, None, None, None)


chunk_forward.register_autograd(_differentiate, setup_context=_keep)


def _refuse_second(ctx, *gradients: Tensor):
    raise NotImplementedError('the kernels of the recurrence have no gradients of gradients: ask for backend="torch"')


chunk_backward.register_autograd(_refuse_second)


class Chunks(torch.autograd.Function):
    """The same without an operator between, which would cost a call more than its kernels take on short inputs."""

    @staticmethod
    def forward(ctx, *inputs):
        output = forward(*inputs)
        _keep(ctx, inputs, output)
        return output

    backward = staticmethod(_differentiate)


FORMS = {"chunk": chunked, "recurrent": decode.recurrent}
