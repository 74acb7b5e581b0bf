"""Linear maps of few vectors, which cost what reading their weights costs: several in one operation, with what stands around them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from linattn.ops import gpu

Biases = Sequence[Tensor | None]
Steps = Sequence[tuple[str, float | Tensor | None]]  # what is done to numbers, in this order
Finish = Sequence[Steps]  # for each product
FINISHES: dict[str, Callable[..., Tensor]] = {
    "log_sigmoid": F.logsigmoid, "softplus": F.softplus, "sigmoid": torch.sigmoid, "tanh": torch.tanh, "exp": torch.exp, "neg": torch.neg,
    "add": torch.add, "mul": torch.mul, "div": torch.div,
}  # fmt: skip


def linears(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Biases,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    size: int = 0,
    gate: Tensor | None = None,
    residual: Tensor | None = None,
    gated: bool = False,
    finish: Finish = (),
    counters: Tensor | None = None,
) -> list[Tensor]:
    """``n(x) Wᵀ + b`` for each of ``weights``; without gradients. n is the identity, or with ``size`` an RMS norm.

    Args:
        x: [..., K].
        weights: [N, K] each, in the dtype of x.
        biases: [N] or None, one for each weight.
        norm, eps, size: each ``size`` neighbours of x are divided by the root of their mean square plus eps, and multiplied by
            ``norm`` [size] or [K], None: ones.
        gate: [..., K], whose SiLU the normed x is multiplied with.
        residual: [..., N], added to the one product.
        gated: the two products a and b become one, ``silu(a) ⊙ b``.
        finish: for each product names of FINISHES, with a number or a tensor [N] for those that take two; what has any is float32.
        counters: int32 zeros, which kernels of a GPU count with and leave as zeros: no other stream may have them meanwhile. With None
            they do without, and so are slower with several x.

    Returns:
        [..., N] for each weight, contiguous; one tensor if ``gated``.
    """
    kernels = _kernels(x, weights)
    if kernels is not None:
        counting = (counters,) if x.is_cuda else ()
        return kernels(x, weights, biases, norm, eps, size, gate, residual, gated, finish, *counting)
    return portable(x, weights, biases, norm, eps, size, gate, residual, gated, finish)


def _kernels(x: Tensor, weights: Sequence[Tensor]) -> Callable[..., list[Tensor]] | None:
    if x.is_cuda:
        if gpu.refusal(x.device) is not None:
            return None
        from linattn.ops.triton import linears as kernels

        return None if kernels.refusal(x, weights) else kernels.linears
    if x.device.type == "cpu":
        from linattn.ops.cpu import matvec as cpu

        return None if cpu.refusal(x, *weights) else cpu.linears
    return None


def portable(
    x: Tensor, weights: Sequence[Tensor], biases: Biases, norm: Tensor | None, eps: float, size: int, gate: Tensor | None,
    residual: Tensor | None, gated: bool, finish: Finish,
) -> list[Tensor]:  # fmt: skip
    """The definition, in operations of torch."""
    x = normed(x, norm, eps, size, gate)
    products = [F.linear(x, w, b) for w, b in zip(weights, biases, strict=True)]
    if gated:
        products = [F.silu(products[0]) * products[1]]
    products = products if residual is None else [residual + products[0]]
    return [finished(y, finish[i]) if i < len(finish) else y for i, y in enumerate(products)]


def stepped(x: Tensor, steps: Steps) -> Tensor:
    """``x`` [..., N] after ``steps``, in float32 (float64 for float64): on a CPU, without gradients, in one kernel."""
    if x.device.type == "cpu":
        from linattn.ops.cpu import matvec as cpu

        if cpu.steps_refusal(x, steps) is None:
            return cpu.stepped(x, steps)
    return finished(x, steps)


def finished(y: Tensor, steps: Steps) -> Tensor:
    """The definition, in operations of torch."""
    y = y.float() if steps and y.dtype != torch.float64 else y
    for name, other in steps:
        y = FINISHES[name](y) if other is None else FINISHES[name](y, other)
    return y


def normed(x: Tensor, norm: Tensor | None, eps: float, size: int, gate: Tensor | None) -> Tensor:
    """``n(x)``, in the dtype of x."""
    if not size:
        return x
    pieces = x.unflatten(-1, (-1, size))
    pieces = pieces if x.dtype == torch.float64 else pieces.float()
    pieces = pieces * torch.rsqrt(pieces.square().mean(-1, keepdim=True) + eps)
    y = pieces.flatten(-2) if norm is None else pieces.flatten(-2) * norm.flatten().repeat(x.shape[-1] // norm.numel())
    y = y.to(x.dtype)
    return y if gate is None else y * F.silu(gate)
