"""Door of the norms over a head's channels: RMS norm, with a swish gate behind it or without, and division by the length.

On a GPU and on a CPU, outside of compiled graphs, each is one kernel forward and one backward that keep nothing but the inputs;
elsewhere they are written as operations of torch, which a compiler fuses.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from linattn.ops import checks, dispatch, tracing


def rms_norm(x: Tensor, weight: Tensor | None = None, gate: Tensor | None = None, *, eps: float, backend: str = "auto") -> Tensor:
    """``x / √(mean x² + eps) * weight * silu(gate)`` over the last axis; sums in float32 (float64 for float64).

    Args:
        x: [..., V], or [..., H, V].
        weight: [V], or [H, V] for a weight of its own in each head; None: ones.
        gate: in the shape of x; None: no gate.
        eps: added to the mean.
        backend: ``"torch"``, ``"cpu"``, ``"triton"``, or ``"auto"``: the kernels where they run the call, else torch.

    Returns:
        In the shape of x and its dtype, or the wider one of x and the gate.

    Raises:
        ValueError: naming the argument, what came and what was wanted.
    """
    return _run(x, weight, gate, eps, True, _checked(x, weight, gate), backend)


def _checked(x: Tensor, weight: Tensor | None, gate: Tensor | None) -> torch.dtype:
    """The dtype of the result."""
    _floating(x=x, weight=weight, gate=gate)
    if weight is not None:
        checks.shape("weight", checks.tensor("weight", weight, x), "[V] or [H, V]", tuple(x.shape[-1:]), tuple(x.shape[-2:]))
    if gate is not None:
        checks.shape("gate", checks.tensor("gate", gate, x), "as x", tuple(x.shape))
    return x.dtype if gate is None else torch.promote_types(x.dtype, gate.dtype)


def unit_length(x: Tensor, *, eps: float, dtype: torch.dtype, backend: str = "auto") -> Tensor:
    """``x / √(Σ x² + eps)`` over the last axis, computed in float32 (float64 for float64) and rounded once, to ``dtype``."""
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
    wanted = tracing.wanted(x, weight, gate)
    if backend == "auto" and not wanted and tracing.faked(x, weight, gate):
        return operator(*arguments)
    name = dispatch.choose(backend, _refusal, x, weight, gate, dtype)
    if name == "torch":
        return portable(*arguments)
    if wanted:
        return Norm.apply(*arguments, name)
    return _kernels(name).forward(*arguments)


def _kernels(name: str) -> Any:
    if name == "cpu":
        from linattn.ops.cpu import norms as cpu

        return cpu
    from linattn.ops.triton import norms as gpu

    return gpu


def _refusal(name: str, asked: bool, x: Tensor, weight: Tensor | None, gate: Tensor | None, dtype: torch.dtype) -> str | None:
    if name == "torch":
        return None
    if name == "reference":
        return "the definition is written in operations of torch"
    if torch.compiler.is_compiling():
        return "a compiler fuses what stands around a norm with it"
    if name == "triton" and (reason := dispatch.gpu_refusal(x, asked)) is not None:
        return reason
    return _kernels(name).refusal(x, weight, gate, dtype)


def _explained(op: Any, *call: Any) -> dispatch.Explained:
    x = call[0]
    return dispatch.Explained(f"{op.__name__} on {x.device}, {x.dtype}, {list(x.shape)}", x.device, _refusal, call)


def _explained_norm(x: Tensor, weight: Tensor | None, gate: Tensor | None, **_: Any) -> dispatch.Explained:
    return _explained(rms_norm, x, weight, gate, _checked(x, weight, gate))


def _explained_length(x: Tensor, dtype: torch.dtype, **_: Any) -> dispatch.Explained:
    _floating(x=x)
    return _explained(unit_length, x, None, None, dtype)


dispatch.explains(rms_norm, _explained_norm)
dispatch.explains(unit_length, _explained_length)


def portable(x: Tensor, weight: Tensor | None, gate: Tensor | None, eps: float, mean: bool, dtype: torch.dtype) -> Tensor:
    """The definition, in operations of torch; ``mean`` or sum of the squares."""
    wide = x if x.dtype == torch.float64 else x.float()
    squares = wide.square()
    y = wide * torch.rsqrt((squares.mean(-1, keepdim=True) if mean else squares.sum(-1, keepdim=True)) + eps)
    y = y if weight is None else y * weight
    return y.to(dtype) if gate is None else y.to(x.dtype) * F.silu(gate)


@torch.library.custom_op(
    "linattn::norm",
    mutates_args=(),
    schema="(Tensor x, Tensor? weight, Tensor? gate, float eps, bool mean, ScalarType dtype) -> Tensor",
)
def operator(x, weight, gate, eps, mean, dtype):
    refused = _refusal("triton", False, x, weight, gate, dtype)
    return (portable if refused else _kernels("triton").forward)(x, weight, gate, eps, mean, dtype).contiguous()


@operator.register_fake
def _(x, weight, gate, eps, mean, dtype):  # noqa: ARG001  torch passes them all
    return x.new_empty(x.shape, dtype=dtype)


class Norm(torch.autograd.Function):
    """The kernels; who asks for a second derivative gets it from the definition."""

    @staticmethod
    def forward(ctx, *inputs):
        *tensors, ctx.eps, ctx.mean, ctx.dtype, ctx.name = inputs
        ctx.save_for_backward(*tensors)
        return _kernels(ctx.name).forward(*inputs[:-1])

    @staticmethod
    def backward(ctx, d_y: Tensor):
        x, weight, gate = tensors = ctx.saved_tensors
        if torch.is_grad_enabled() or tracing.traced(d_y):
            return *_differentiable(d_y, tensors, (ctx.eps, ctx.mean, ctx.dtype)), None, None, None, None
        return *_kernels(ctx.name).backward(d_y, x, weight, gate, ctx.eps, ctx.mean, ctx.dtype), None, None, None, None


def _differentiable(d_y: Tensor, tensors: tuple[Any, ...], options: tuple[Any, ...]) -> tuple[Tensor | None, ...]:
    create = torch.is_grad_enabled()
    with torch.enable_grad():
        leaves = tensors if create else [None if t is None else t.detach().requires_grad_(t.requires_grad) for t in tensors]
        wanted = [t for t in leaves if t is not None and t.requires_grad]
        found = iter(torch.autograd.grad(portable(*leaves, *options), wanted, d_y, create_graph=create))
    return tuple(None if t is None or not t.requires_grad else next(found) for t in leaves)
