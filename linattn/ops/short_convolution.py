"""Short convolution before many recurrences: depthwise over a few tokens, with SiLU.

All backends keep channels last in x and y, so that neither is copied, and save only the inputs for backward. On a CPU compilers get
the sum of shifted products, which they fuse with neighbouring operations; on a GPU they get an operator, because their own sums over
all tokens, for the weight's gradient, cost more than fusion saves.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from linattn.ops import checks, dispatch, sharding, tracing
from linattn.ops.inputs import Backend
from linattn.ops.operator import Operator, Pass, by_definition
from linattn.ops.torch import short_convolution as portable


@sharding.shards
def short_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    before: Tensor | None = None,
    activation: bool = True,
    backend: Backend = "auto",
) -> Tensor:
    """Compute ``y_t = silu(bias + sum over i < W of weight_i x_{t - (W - 1) + i})``, causal and depthwise.

    Args:
        x: [B, T, D], any T.
        weight: [D, 1, W], as in a depthwise ``nn.Conv1d``; may be float32 (float64) beside half-precision x.
        bias: [D]; None: 0.
        before: [B, W - 1, D], the tokens before the first in the dtype of x; None: zeros.
        activation: False omits the SiLU.
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
        raise ValueError(f"activation must be True (SiLU) or False, but came as {activation!r}")
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


def _refusal(name: str, asked: bool, x: Tensor, *others: Tensor | None) -> str | None:
    return dispatch.refusal(name, asked, x, _kernels, (x, *others), defined=True)


def _run(x: Tensor, before: Tensor | None, weight: Tensor, bias: Tensor | None, activation: bool, backend: str) -> Tensor:
    tensors = (x, before, weight, bias)
    fuses = torch.compiler.is_compiling() and backend != "triton"
    if fuses or tracing.transformed() or tracing.foreign(*tensors) or x.numel() == 0:
        return portable.shifted(x, before, weight, bias, activation)
    y: Tensor = KERNELS(*tensors, activation, backend)
    return y


def _kernels(backend: str) -> ModuleType:
    if backend == "cpu":
        from linattn.ops.cpu import short_convolution as cpu

        return cpu
    if backend == "triton":
        from linattn.ops.triton import short_convolution as gpu

        return gpu
    return portable


class _Chosen:
    """Kernels of the backend in the last argument, which may be the portable blocks."""

    @staticmethod
    def forward(*arguments: Any) -> Tensor:
        y: Tensor = _kernels(arguments[-1]).forward(*arguments[:-1])
        return y

    @staticmethod
    def backward(*arguments: Any) -> Sequence[Tensor | None]:
        gradients: Sequence[Tensor | None] = _kernels(arguments[-1]).backward(*arguments[:-1])
        return gradients

    @staticmethod
    def outputs(x: Tensor, *_: Any) -> Tensor:
        return x.new_empty(x.shape)

    @staticmethod
    def gradients(_: Tensor, *arguments: Any) -> Sequence[Tensor | None]:
        return [None if t is None else t.new_empty(t.shape) for t in arguments[:4]]


_INPUTS = "Tensor x, Tensor? before, Tensor weight, Tensor? bias, bool activation, str backend"
KERNELS = Operator(
    lambda: _Chosen,
    Pass(f"({_INPUTS}) -> Tensor", "short_convolution"),
    Pass(f"(Tensor d_y, {_INPUTS}) -> (Tensor, Tensor, Tensor, Tensor)", "short_convolution_backward"),
    "y", "x before weight bias", "x", derivative=by_definition(lambda *given: portable.shifted(*given[:5])),
    once="linattn::short_convolution_backward has no gradients",
)  # fmt: skip


def _explained(
    x: Tensor, weight: Tensor, bias: Tensor | None, before: Tensor | None, activation: bool, **_: Any
) -> dispatch.Explained:  # fmt: skip
    _check(x, weight, bias, before, activation)
    return dispatch.explained(short_convolution, x, _refusal, x, weight, bias, before, more=f", {weight.shape[2]} taps")


dispatch.explains(short_convolution, _explained)
