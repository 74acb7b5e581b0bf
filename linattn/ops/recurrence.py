"""Operators of the recurrence's kernels: token by token on a CPU, in chunks on a GPU, also for rows that several processes share."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor, fx

from linattn.ops import gpu, steps, tracing
from linattn.ops.inputs import Flat, Inputs, Outputs
from linattn.ops.operator import Operator, Pass
from linattn.ops.torch import deferred
from linattn.ops.torch.deferred import Deferred


def _cpu() -> ModuleType:
    from linattn.ops.cpu import linear_attention

    return linear_attention


def _chunks() -> ModuleType:
    from linattn.ops.triton import chunks

    return chunks


def _parts() -> ModuleType:
    from linattn.ops.triton import parts

    return parts


_CPU = (
    "Tensor q, Tensor k, Tensor v, Tensor? decay, Tensor? beta, Tensor? read, Tensor? write, Tensor? bonus, Tensor? initial, "
    "Tensor? initial_z, Tensor? cu_seqlens, float scale, bool normalized"
)
_GPU = _CPU.replace("Tensor? initial_z, ", "").replace(", bool normalized", "")
_PREPARED = "Tensor p, Tensor b, Tensor fade, Tensor settled, Tensor keys, Tensor queries"
WALK = Operator(
    _cpu,
    Pass(f"({_CPU}, bool keeps) -> ({', '.join(['Tensor'] * 5)})", "cpu_linear_attention"),
    Pass(
        f"(Tensor d_o, Tensor? d_final, Tensor? d_denominator, Tensor? d_final_z, {_CPU}, Tensor kept, bool of_decay) -> "
        f"({', '.join(['Tensor'] * 10)})", "cpu_linear_attention_backward",
    ),
    "o final denominator final_z kept", "q k v decay beta read write bonus initial initial_z", "v", "CPU", save_flag=True,
    recorded="forward_whole",
    once='the CPU kernels of linear_attention are differentiable once; backend="torch" has gradients of gradients',
)  # fmt: skip
CHUNKS = Operator(
    _chunks,
    Pass(f"({_GPU}, bool wide, bool keeps) -> ({', '.join(['Tensor'] * 10)})", "chunk_forward"),
    Pass(
        f"(Tensor do, Tensor? dfinal, {_GPU}, bool ddecay, Tensor starts, Tensor links, {_PREPARED}) -> ({', '.join(['Tensor'] * 9)})",
        "chunk_backward",
    ),
    "o final starts links p b fade settled keys queries", "q k v decay beta read write bonus initial", "v", save_flag=True,
    recorded="recorded",
    once='the kernels of the recurrence have no gradients of gradients: ask for backend="torch"',
)  # fmt: skip
PARTS = Operator(
    _parts,
    Pass(f"({_GPU}, bool wide, bool last, Any group, bool keeps) -> ({', '.join(['Tensor'] * 11)})"),
    Pass(
        f"(Tensor do, Tensor? dfinal, {_GPU}, bool ddecay, bool last, Any group, Tensor starts, Tensor links, Tensor passages, "
        f"{_PREPARED}) -> ({', '.join(['Tensor'] * 9)})"
    ),
    "o final starts links passages p b fade settled keys queries", "q k v decay beta read write bonus initial", "v", save_flag=True,
    once='the kernels of the recurrence have no gradients of gradients: ask for backend="torch"',
)  # fmt: skip


def recorded(inputs: Inputs) -> bool:
    """True if a step graph records ``inputs``, which has a state and returns the next one."""
    return tracing.recording_step() and inputs.initial is not None and inputs.return_state


def step(inputs: Inputs) -> Outputs:
    """Run ``inputs`` as a step operator."""
    o, denominator, state, z = _step(*inputs.flat)
    return Outputs(o, denominator, state, z) if inputs.denominator else Outputs(o, None, state, None)


def step_(*call: Any) -> tuple[Tensor, Tensor | None]:
    """Output and denominator of the call :class:`linattn.ops.inputs.Flat`, whose final states overwrite its initial ones."""
    if gpu.on_gpu(call[0]):
        from linattn.ops.triton import decode

        out = decode.step_(Flat(*call).inputs(), overlapped=True)  # each state occurs once in a step, and steps run one after the other
        return out.o, out.denominator
    o, denominator, run = _cpu().bound_step(*call)
    run()
    return o, denominator


def deferred_step_(*arguments: Any) -> tuple[Tensor, None]:
    """:func:`step_` that writes the states only at every n-th call: 13 arguments of a call, then those of :class:`Deferred`."""
    call, kept = Flat(*arguments[:13]), Deferred(*arguments[13:])
    if gpu.on_gpu(call.v):
        from linattn.ops.triton import deferred as kernels

        return kernels.step_(call, kept), None
    return deferred.step_(call, kept), None


def _run_step(*call: Any) -> tuple[Tensor, ...]:
    inputs = Flat(*call).inputs()
    if gpu.on_gpu(inputs.v):
        from linattn.ops.triton import decode

        out = decode.recurrent(inputs)
    else:
        out = walk(inputs)
    return tuple(inputs.v.new_empty((0,)) if t is None else t for t in (out.o, out.denominator, out.state, out.z))


def _fake_step(*call: Any) -> tuple[Tensor, ...]:
    x = Flat(*call)
    assert x.initial is not None, "the step operator has an initial state"
    new, wide = x.v.new_empty, torch.float32
    o, state = new(x.v.shape, dtype=wide if x.denominator else x.v.dtype), new(x.initial.shape, dtype=wide)
    if not x.denominator:
        return o, new((0,)), state, new((0,))
    return o, new(x.v.shape[:3], dtype=wide), state, new(x.initial.shape[:3], dtype=wide)


_step = steps.define(
    "recurrent_step",
    f"({_CPU.replace('Tensor? initial,', 'Tensor initial,')}) -> (Tensor o, Tensor denominator, Tensor final, Tensor final_z)",
    _run_step, _fake_step, steps.Step(step_, {"initial": "final", "initial_z": "final_z"}), tags=(torch.Tag.needs_exact_strides,),
)  # fmt: skip


fx.node.has_side_effect(deferred_step_)


def walk(inputs: Inputs) -> Outputs:
    """Run ``inputs`` on a CPU; differentiable once."""
    o, final, denominator, final_z, _ = WALK(*inputs.flat)
    return Outputs(o, denominator, final, final_z) if inputs.denominator else Outputs(o, None, final, None)
