"""Linear maps of few vectors, which cost what reading their weights costs: several in one operation, with what stands around them."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

from torch import Tensor

from linattn.ops import dispatch
from linattn.ops.torch.linears import Biases, Finish, Steps, finished, portable


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
        finish: for each product names of ``FINISHES`` (torch/linears.py), with a number or a tensor [N] for those
            that take two; what has any is float32.
        counters: int32 zeros, which kernels of a GPU count with and leave as zeros: no other stream may have them meanwhile. With None
            they do without, and so are slower with several x.

    Returns:
        [..., N] for each weight, contiguous; one tensor if ``gated``.
    """
    name = dispatch.choose("auto", _refusal, x, weights)
    if name == "torch":
        return portable(x, weights, biases, norm, eps, size, gate, residual, gated, finish)
    counting = (counters,) if name == "triton" else ()
    products: list[Tensor] = _load(name).linears(x, weights, biases, norm, eps, size, gate, residual, gated, finish, *counting)
    return products


def _refusal(name: str, asked: bool, x: Tensor, weights: Sequence[Tensor]) -> str | None:
    return dispatch.refusal(name, asked, x, _load, (x, *weights))


def _load(name: str) -> ModuleType:
    if name == "cpu":
        from linattn.ops.cpu import linears as cpu

        return cpu
    from linattn.ops.triton import linears as triton

    return triton


def _explained(x: Tensor, weights: Sequence[Tensor], **_: Any) -> dispatch.Explained:
    return dispatch.explained(linears, x, _refusal, x, weights, more=f", {len(weights)} weights")


dispatch.explains(linears, _explained)


def stepped(x: Tensor, steps: Steps) -> Tensor:
    """``x`` [..., N] after ``steps``, in float32 (float64 for float64): on a CPU, without gradients, in one kernel."""
    if x.device.type == "cpu":
        from linattn.ops.cpu import linears as cpu

        if cpu.steps_refusal(x, steps) is None:
            return cpu.stepped(x, steps)
    return finished(x, steps)
