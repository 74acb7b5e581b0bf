"""Norms over a head's channels: RMS norm, optionally with a swish gate, and division by the length.

On a GPU and on a CPU, outside of compiled graphs, each is one forward and one backward kernel that save only the inputs;
elsewhere they are operations of torch, which a compiler fuses. On a GPU compiled graphs have an operator where there is neither weight nor
gate: torch's compiler takes twice as long for lengths of 128 channels.
"""

from __future__ import annotations

from functools import partial
from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor

from linattn.ops import checks, dispatch, tracing
from linattn.ops.inputs import Backend
from linattn.ops.operator import Operator, Pass, by_definition, refused, register
from linattn.ops.torch.norms import norm as portable


def rms_norm(x: Tensor, weight: Tensor | None = None, gate: Tensor | None = None, *, eps: float, backend: Backend = "auto") -> Tensor:
    """Compute ``x / √(mean x² + eps) * weight * silu(gate)`` over the last axis, with sums in float32 (float64 for float64).

    Args:
        x: [..., V], or [..., H, V].
        weight: [V], or [H, V] for a weight per head; None: ones.
        gate: in the shape of x; None: no gate.
        eps: added to the mean.
        backend: ``"torch"``, ``"cpu"``, ``"triton"``, or ``"auto"``: the kernels where they run the call, else torch.

    Returns:
        A tensor in the shape of x, in the wider dtype of x and the gate.

    Raises:
        ValueError: naming the argument, what came and what was wanted.
    """
    return _run(x, weight, gate, eps, True, _checked(x, weight, gate), backend)


def _checked(x: Tensor, weight: Tensor | None, gate: Tensor | None) -> torch.dtype:
    """Check the arguments; returns the dtype of the result."""
    _floating(x=x, weight=weight, gate=gate)
    if weight is not None:
        checks.shape("weight", checks.tensor("weight", weight, x), "[V] or [H, V]", tuple(x.shape[-1:]), tuple(x.shape[-2:]))
    if gate is not None:
        checks.shape("gate", checks.tensor("gate", gate, x), "as x", tuple(x.shape))
    return x.dtype if gate is None else torch.promote_types(x.dtype, gate.dtype)


def unit_length(x: Tensor, *, eps: float, dtype: torch.dtype, backend: Backend = "auto") -> Tensor:
    """Compute ``x / √(Σ x² + eps)`` over the last axis in float32 (float64 for float64) and rounded once, to ``dtype``."""
    _floating(x=x)
    return _run(x, None, None, eps, False, dtype, backend)


def _floating(**tensors: Tensor | None) -> None:
    for name, t in tensors.items():
        if t is not None or name == "x":
            checks.dtype(name, checks.tensor(name, t), *checks.DTYPES)
    if tensors["x"].ndim == 0:  # type: ignore[union-attr]
        raise ValueError("x must have shape [..., V], but came with []")


def _run(x: Tensor, weight: Tensor | None, gate: Tensor | None, eps: float, mean: bool, dtype: torch.dtype, backend: str) -> Tensor:
    arguments = (x, weight, gate, eps, mean, dtype)
    if backend == "auto" and tracing.faked(x, weight, gate) and not tracing.wanted(x, weight, gate):
        return cast(Tensor, operator(*arguments))
    name = dispatch.choose(backend, _refusal, x, weight, gate, dtype)
    return portable(*arguments) if name == "torch" else cast(Tensor, KERNELS[name](*arguments))


def _load(name: str) -> ModuleType:
    if name == "cpu":
        from linattn.ops.cpu import norms as cpu

        return cpu
    from linattn.ops.triton import norms as gpu

    return gpu


def _refusal(name: str, asked: bool, x: Tensor, weight: Tensor | None, gate: Tensor | None, dtype: torch.dtype) -> str | None:
    if name in KERNELS and torch.compiler.is_compiling():
        if name == "cpu" or weight is not None or gate is not None or tracing.foreign(x):
            return "a compiler fuses the norm with adjacent operations"
    elif name == "triton" and tracing.traced(x, weight, gate):
        return "tracing is active, which needs PyTorch operations"
    return dispatch.refusal(name, asked, x, KERNELS.__getitem__, (x, weight, gate, dtype))


def _explained_norm(x: Tensor, weight: Tensor | None, gate: Tensor | None, **_: Any) -> dispatch.Explained:
    return dispatch.explained(rms_norm, x, _refusal, x, weight, gate, _checked(x, weight, gate))


def _explained_length(x: Tensor, dtype: torch.dtype, **_: Any) -> dispatch.Explained:
    _floating(x=x)
    return dispatch.explained(unit_length, x, _refusal, x, None, None, dtype)


dispatch.explains(rms_norm, _explained_norm)
dispatch.explains(unit_length, _explained_length)


def _operator(name: str) -> Operator:
    inputs = "Tensor x, Tensor? weight, Tensor? gate, float eps, bool mean, ScalarType dtype"
    names = ("gpu_norm", "gpu_norm_backward") if name == "triton" else ("", "")
    forward, backward = Pass(f"({inputs}) -> Tensor", names[0]), Pass(f"(Tensor d_y, {inputs}) -> (Tensor, Tensor, Tensor)", names[1])
    return Operator(partial(_load, name), forward, backward, "y", "x weight gate", "x", derivative=by_definition(portable))


KERNELS = {name: _operator(name) for name in ("triton", "cpu")}


def _either(x: Tensor, weight: Tensor | None, gate: Tensor | None, eps: float, mean: bool, dtype: torch.dtype) -> Tensor:
    """Run the GPU kernel or, if it refuses, operations of torch, because a traced graph may run on any device."""
    refused = _refusal("triton", False, x, weight, gate, dtype)
    y: Tensor = (portable if refused else KERNELS["triton"].load().forward)(x, weight, gate, eps, mean, dtype)
    return y.contiguous()


operator = register(
    "norm", "(Tensor x, Tensor? weight, Tensor? gate, float eps, bool mean, ScalarType dtype) -> Tensor", _either,
    lambda x, *options: x.new_empty(x.shape, dtype=options[-1]), gradient=refused("linattn::norm has no gradients"),
)  # fmt: skip
