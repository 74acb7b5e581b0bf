"""GPU backend of the recurrence: refusals, choice of the form, and calls of the kernels."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from linattn.ops import gpu, sharding, tracing
from linattn.ops.inputs import Bonus, Delta, Erase, Inputs, Outputs, operands
from linattn.ops.recurrence import CHUNKS, PARTS
from linattn.ops.triton import decode, fitting, hopper, launch
from linattn.ops.triton.arguments import Arguments, in_rows, side_by_side
from linattn.ops.triton.chunks import WIDEST, name
from linattn.ops.triton.plan import CHANNEL, HEAD, NONE
from linattn.ops.triton.run import Run

STEPS = 16  # largest number of tokens for which steps are faster than chunks


def refusal(inputs: Inputs, form: str) -> str | None:
    """Reason why the kernels do not run ``inputs``, or None if they do."""
    if inputs.v.dtype == torch.float64:
        return "it computes in float32 at most, and the inputs are float64"
    if (reason := tracing.refusal() or inputs.kernel_refusal(form)) is not None:
        return reason
    if form_of(inputs, form) == "recurrent":
        return decode.refusal(inputs)
    erasing = isinstance(inputs.rule, (Delta, Erase))
    widest = WIDEST if erasing else 2 * WIDEST
    if max(inputs.k.shape[3], inputs.v.shape[3]) > widest:
        what = "with beta or erase" if erasing else "without beta and erase"
        return f"{what} it takes K and V up to {widest}, but they are {inputs.k.shape[3]} and {inputs.v.shape[3]}"
    beta, read, _, bonus = operands(inputs.rule)
    kinds = (inputs.k, inputs.v, inputs.decay_per_channel, inputs.decay is None, beta, read, bonus)
    passes = ("forward", "backward") if tracing.wanted(*inputs.differentiable) else ("forward",)
    return fitting.refusal(*(name(each, *kinds) for each in passes))


def form_of(inputs: Inputs, form: str) -> str:
    """Form that ``auto`` selects: steps for a few tokens without gradients, else chunks."""
    if form != "auto":
        return form
    return "recurrent" if inputs.v.shape[1] <= STEPS and decode.refusal(inputs) is None else "chunk"


def off(inputs: Inputs, form: str) -> list[str]:
    """Optimizations that are off for ``inputs``, for ``explain``: a line for each, with the reason."""
    device, lines = inputs.v.device, launch.off(inputs.v.device)
    if device.type != "cuda" or form_of(inputs, form) != "chunk" or gpu.capability(device) != (9, 0):
        return lines
    rank = NONE if inputs.decay is None else CHANNEL if inputs.decay_per_channel else HEAD
    sizes, own = (inputs.k.shape[3], inputs.v.shape[3]), operands(inputs.rule)[2] if rank != CHANNEL else None
    laid_out = (in_rows(t) for t in (side_by_side(inputs.v), inputs.q, inputs.k, own))
    reason = hopper.gluon_refusal(device) or hopper.unsuited(sizes, *laid_out)
    if reason is not None:
        return [*lines, f"hopper kernels: off, because {reason}"]
    return [*lines, *off_backwards(inputs)] if tracing.wanted(*inputs.differentiable) else lines


def off_backwards(x: Inputs) -> list[str]:
    """Optimizations of Hopper's backward pass that are off for ``x``; none if there are none for it."""
    given = Arguments(x.q, x.k, x.v, _over_time(x.decay, x), *operands(x.rule), None, x.cu_seqlens)
    run = Run(launch.Recorder(x.v, ()), given, 1.0)
    run.fast = True
    if not run.fusible:
        return []
    if (reason := run.separate(x.decay is not None and x.decay.requires_grad)) is not None:
        return [f"one kernel for the backward pass: off, because {reason}"]
    if (run.rowwise or run.family.decay == CHANNEL) and (reason := run.unkept()) is not None:
        return [f"chunks prepared once for both passes: off, because {reason}"]
    return []


def chunked(inputs: Inputs, group: sharding.Group | None = None) -> Outputs:
    """Run ``inputs`` in chunks; differentiable once. ``group``: the processes that have the other parts of the rows."""
    o, state = _wide_keys(inputs, inputs.v, inputs.initial, inputs.denominator, group)
    if not inputs.denominator:
        return Outputs(o, None, state, None)
    # z is a state with one column and values of 1.
    ones = inputs.v.new_ones(()).expand(*inputs.v.shape[:3], 1)
    initial = None if inputs.initial_z is None else inputs.initial_z[..., None]
    below, z = _wide_keys(inputs, ones, initial, True, group)
    return Outputs(o, below[..., 0], state, None if z is None else z[..., 0])


def _wide_keys(x: Inputs, v: Tensor, initial: Tensor | None, wide: bool, group: sharding.Group | None) -> tuple[Tensor, Tensor | None]:
    """Split many channels of keys into parts that are summed: without erasure the channels are independent."""
    size = x.k.shape[3]
    if size <= WIDEST:
        return _call(x, v, initial, wide, group)
    parts = [slice(a, min(a + WIDEST, size)) for a in range(0, size, WIDEST)]
    results = [_call(_channels(x, part), v, None if initial is None else initial[:, :, part], True, group) for part in parts]
    o, states = torch.stack([o for o, _ in results]).sum(0), [state for _, state in results if state is not None]
    return o if wide else o.to(v.dtype), torch.cat(states, 2) if states else None


def _channels(x: Inputs, part: slice) -> Inputs:
    decay = x.decay[..., part] if x.decay is not None and x.decay_per_channel else x.decay
    rule = Bonus(x.rule.u[:, part]) if isinstance(x.rule, Bonus) else x.rule
    return replace(x, q=x.q[..., part], k=x.k[..., part], decay=decay, rule=rule)


def _call(x: Inputs, v: Tensor, initial: Tensor | None, wide: bool, group: sharding.Group | None) -> tuple[Tensor, Tensor | None]:
    call = (x.q, x.k, v, _over_time(x.decay, x), *operands(x.rule), initial, x.cu_seqlens, x.scale, wide)
    o, state, *_ = CHUNKS(*call) if group is None else PARTS(*call, x.return_state, group)
    return o, state


def _over_time(decay: Tensor | None, x: Inputs) -> Tensor | None:
    """A constant decay at each token."""
    return decay if decay is None or not x.decay_constant else decay.float().expand(*x.v.shape[:2], *decay.shape)


FORMS = {"chunk": chunked, "recurrent": decode.recurrent}
