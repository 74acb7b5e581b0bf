"""Door of the short convolution that stands before many recurrences: each channel on its own, over a few tokens, with its SiLU.

Whatever runs it, x comes and y goes with the channels last, so that neither is copied into another order, and backward starts
from the inputs alone. On a CPU a compiler is given the sum of shifted products, which it fuses with what stands around; of the
kernels for a GPU it gets an operator, since its own sums over all tokens, for the weight's gradient, take longer than they save.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from linattn.ops import checks, dispatch, tracing
from linattn.ops.torch import short_convolution as portable

Gradients = tuple[Tensor | None, ...]  # of x, before, weight and bias


def short_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    before: Tensor | None = None,
    activation: bool = True,
    backend: str = "auto",
) -> Tensor:
    """``y_t = silu(bias + sum over i < W of weight_i x_{t - (W - 1) + i})``: causal, depthwise, the last tap meets the token itself.

    Args:
        x: [B, T, D], any T.
        weight: [D, 1, W], as that of a depthwise ``nn.Conv1d``; may be float32 (float64) beside half-precision x.
        bias: [D], None for none.
        before: [B, W - 1, D], the tokens before the first in the dtype of x; None: zeros.
        activation: False leaves the SiLU out.
        backend: ``"reference"`` (token by token), ``"torch"`` (every device), ``"cpu"`` (native), ``"triton"`` (GPU), or ``"auto"``: the
            kernels where they run the call, else torch.

    Returns:
        y [B, T, D] in the dtype of x, contiguous. Sums and the SiLU are float32, float64 if x or the weight is.

    Raises:
        ValueError: naming the argument, what came and what was wanted.
    """
    _check(x, weight, bias, before, activation)
    name = dispatch.choose(backend, _refusal, x, weight, bias, before)
    with checks.no_autocast(x):
        if name == "reference":
            from linattn.ops.reference.short_convolution import short_convolution as definition

            return definition(x, before, weight, bias, activation)
        return _run(x, before, weight, bias, activation, name)


def _check(x: Tensor, weight: Tensor, bias: Tensor | None, before: Tensor | None, activation: bool) -> None:
    if not isinstance(activation, bool):
        raise ValueError(f"activation must be True (its SiLU) or False, but came as {activation!r}")
    if checks.tensor("x", x).ndim != 3:
        raise ValueError(f"x must have shape [B, T, D], but came with {list(x.shape)}")
    checks.dtype("x", x, *checks.DTYPES)
    batch, _, width = x.shape
    if checks.tensor("weight", weight, x).ndim != 3 or weight.shape[:2] != (width, 1) or weight.shape[2] < 1:
        raise ValueError(f"weight must have shape [D, 1, W] with D = {width} of x and W >= 1, but came with {list(weight.shape)}")
    checks.dtype("weight", weight, *checks.DTYPES)
    if bias is not None:
        checks.shape("bias", checks.tensor("bias", bias, x), "[D]", (width,))
        checks.dtype("bias", bias, *checks.DTYPES)
    if before is not None:
        checks.shape("before", checks.tensor("before", before, x), "[B, W - 1, D]", (batch, weight.shape[2] - 1, width))
        checks.dtype("before", before, x.dtype)


def _refusal(name: str, asked: bool, x: Tensor, weight: Tensor, bias: Tensor | None, before: Tensor | None) -> str | None:
    if name == "reference":
        return dispatch.definition_refusal(asked)
    if name == "cpu":
        from linattn.ops.cpu import short_convolution as cpu

        return cpu.refusal(x, weight, bias, before)
    if name == "torch":
        return None
    reason = dispatch.gpu_refusal(x, asked)
    if reason is None:
        from linattn.ops.triton import short_convolution as gpu

        reason = gpu.refusal(x, weight)
    return reason


def _run(x: Tensor, before: Tensor | None, weight: Tensor, bias: Tensor | None, activation: bool, backend: str) -> Tensor:
    tensors = (x, before, weight, bias)
    fuses = torch.compiler.is_compiling() and backend != "triton"
    if fuses or tracing.transformed() or tracing.foreign(*tensors) or x.numel() == 0:
        return portable.shifted(x, before, weight, bias, activation)
    if tracing.traced(*tensors):
        return operator(x, before, weight, bias, activation, backend)  # who looks on sees one operator, and counts its operations
    if tracing.wanted(*tensors):
        return ShortConvolution.apply(x, before, weight, bias, activation, backend)
    return forward(x, before, weight, bias, activation, backend)


def forward(x: Tensor, before: Tensor | None, weight: Tensor, bias: Tensor | None, activation: bool, backend: str) -> Tensor:
    return _kernels(backend).forward(x, before, weight, bias, activation)


def backward(
    d_y: Tensor, x: Tensor, before: Tensor | None, weight: Tensor, bias: Tensor | None, activation: bool, backend: str
) -> Gradients:
    return _kernels(backend).backward(d_y, x, before, weight, bias, activation)


def _kernels(backend: str) -> Any:
    if backend == "cpu":
        from linattn.ops.cpu import short_convolution as cpu

        return cpu
    if backend == "triton":
        from linattn.ops.triton import short_convolution as gpu

        return gpu
    return portable


def _save(ctx, inputs, output) -> None:  # noqa: ARG001  torch passes it by its name
    *tensors, ctx.activation, ctx.backend = inputs
    ctx.save_for_backward(*tensors)


def _gradient(ctx, d_y: Tensor):
    x, before, weight, bias = tensors = ctx.saved_tensors
    with checks.no_autocast(d_y):
        if torch.is_grad_enabled():  # somebody may ask for a second derivative
            gradients = _differentiable(d_y, x, before, weight, bias, ctx.activation)
        elif tracing.traced(d_y):
            gradients = _absent(tensors, backward_operator(d_y, *tensors, ctx.activation, ctx.backend))
        else:
            gradients = backward(d_y, x, before, weight, bias, ctx.activation, ctx.backend)
    return *gradients, None, None


def _differentiable(d_y: Tensor, x: Tensor, before: Tensor | None, weight: Tensor, bias: Tensor | None, activation: bool) -> Gradients:
    tensors = (x, before, weight, bias)
    wanted = [t for t in tensors if t is not None and t.requires_grad]
    found = iter(torch.autograd.grad(portable.shifted(x, before, weight, bias, activation), wanted, d_y, create_graph=True))
    return tuple(None if t is None or not t.requires_grad else next(found) for t in tensors)


def _absent(tensors: tuple[Tensor | None, ...], gradients: tuple[Tensor, ...]) -> Gradients:
    return tuple(None if t is None else g for t, g in zip(tensors, gradients, strict=True))


class ShortConvolution(torch.autograd.Function):
    """Saves nothing but its inputs."""

    @staticmethod
    def forward(ctx, *inputs):
        _save(ctx, inputs, None)
        return forward(*inputs)

    backward = staticmethod(_gradient)


_INPUTS = "Tensor x, Tensor? before, Tensor weight, Tensor? bias, bool activation, str backend"


@torch.library.custom_op("linattn::short_convolution", mutates_args=(), schema=f"({_INPUTS}) -> Tensor")
def operator(x, before, weight, bias, activation, backend):
    return forward(x, before, weight, bias, activation, backend)


@torch.library.custom_op(
    "linattn::short_convolution_backward", mutates_args=(), schema=f"(Tensor d_y, {_INPUTS}) -> (Tensor, Tensor, Tensor, Tensor)"
)
def backward_operator(d_y, x, before, weight, bias, activation, backend):
    return tuple([x.new_empty((0,)) if g is None else g for g in backward(d_y, x, before, weight, bias, activation, backend)])


@operator.register_fake
def _(x, *_):
    return x.new_empty(x.shape)


@backward_operator.register_fake
def _(_, x, before, weight, bias, *__):
    return tuple([x.new_empty((0,)) if t is None else t.new_empty(t.shape) for t in (x, before, weight, bias)])


operator.register_autograd(_gradient, setup_context=_save)
