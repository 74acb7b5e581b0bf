"""Operators of the recurrence's kernels: token by token on a CPU, in chunks on a GPU, also for rows that several processes share."""

from __future__ import annotations

from types import ModuleType

from linattn.ops.inputs import Inputs, Outputs
from linattn.ops.operator import Operator, Pass


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
WALK = Operator(
    _cpu,
    Pass(f"({_CPU}, bool keeps) -> ({', '.join(['Tensor'] * 5)})", "cpu_linear_attention"),
    Pass(
        f"(Tensor d_o, Tensor? d_final, Tensor? d_denominator, Tensor? d_final_z, {_CPU}, Tensor kept, bool of_decay) -> "
        f"({', '.join(['Tensor'] * 10)})", "cpu_linear_attention_backward",
    ),
    "o final denominator final_z kept", "q k v decay beta read write bonus initial initial_z", "v", "CPU", keeps=True,
    recorded="forward_whole",
    once='the CPU kernels of linear_attention are differentiable once; backend="torch" has gradients of gradients',
)  # fmt: skip
CHUNKS = Operator(
    _chunks,
    Pass(f"({_GPU}, bool wide, bool keeps) -> ({', '.join(['Tensor'] * 4)})", "chunk_forward"),
    Pass(
        f"(Tensor do, Tensor? dfinal, {_GPU}, bool ddecay, Tensor starts, Tensor links) -> ({', '.join(['Tensor'] * 9)})",
        "chunk_backward",
    ),
    "o final starts links", "q k v decay beta read write bonus initial", "v", keeps=True,
    once='the kernels of the recurrence have no gradients of gradients: ask for backend="torch"',
)  # fmt: skip
PARTS = Operator(
    _parts,
    Pass(f"({_GPU}, bool wide, bool last, Any group, bool keeps) -> ({', '.join(['Tensor'] * 5)})"),
    Pass(
        f"(Tensor do, Tensor? dfinal, {_GPU}, bool ddecay, bool last, Any group, Tensor starts, Tensor links, Tensor passages) -> "
        f"({', '.join(['Tensor'] * 9)})"
    ),
    "o final starts links passages", "q k v decay beta read write bonus initial", "v", keeps=True,
    once='the kernels of the recurrence have no gradients of gradients: ask for backend="torch"',
)  # fmt: skip


def walk(inputs: Inputs) -> Outputs:
    """Run ``inputs`` on a CPU; differentiable once."""
    o, final, denominator, final_z, _ = WALK(*inputs.flat)
    return Outputs(o, denominator, final, final_z) if inputs.denominator else Outputs(o, None, final, None)
