"""Linear maps of few vectors, whose cost is reading the weights: several maps in one operation, fused with neighbouring operations."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

from torch import Tensor

from linattn.ops import dispatch
from linattn.ops.torch.linears import Biases, Finish, Matrix, Norm, Steps, finished, portable


def linears(
    x: Tensor,
    weights: Sequence[Matrix],
    biases: Biases,
    *,
    norm: Norm | None = None,
    residual: Tensor | None = None,
    gated: bool = False,
    finish: Finish = (),
    counters: Tensor | None = None,
) -> list[Tensor]:
    """Compute ``n(x) Wᵀ + b`` for each of ``weights``, without gradients. n is ``norm``, or the identity.

    Args:
        x: [..., K].
        weights: [N, K] each, in the dtype of x, or quantised (:class:`linattn.ops.torch.quantised.Quantised`).
        biases: [N] or None, one for each weight.
        norm: RMS norm of x, and a gate behind it; None: neither.
        residual: [..., N], added to the only product.
        gated: combine the two products a and b to ``silu(a) ⊙ b``.
        finish: elementwise steps on each product: a name of ``FINISHES`` (torch/linears.py), with a number or a tensor [N] for
            steps of two operands. A product with steps is float32.
        counters: int32 zeros for GPU kernels, which leave them as zeros; no other stream may use them at the same time. None is
            slower with several x.

    Returns:
        [..., N] for each weight, contiguous; one tensor if ``gated``.
    """
    name = dispatch.choose("auto", _refusal, x, weights)
    if name == "torch":
        return portable(x, weights, biases, norm, residual, gated, finish)
    counting = (counters,) if name == "triton" else ()
    products: list[Tensor] = _load(name).linears(x, weights, biases, norm, residual, gated, finish, *counting)
    return products


def _refusal(name: str, asked: bool, x: Tensor, weights: Sequence[Matrix]) -> str | None:
    return dispatch.refusal(name, asked, x, _load, (x, *weights))


def _load(name: str) -> ModuleType:
    if name == "cpu":
        from linattn.ops.cpu import linears as cpu

        return cpu
    from linattn.ops.triton import quantised as triton

    return triton


def _explained(x: Tensor, weights: Sequence[Matrix], **_: Any) -> dispatch.Explained:
    return dispatch.explained(linears, x, _refusal, x, weights, more=f", {len(weights)} weights")


dispatch.explains(linears, _explained)


def stepped(x: Tensor, steps: Steps) -> Tensor:
    """Apply ``steps`` to ``x`` [..., N] in float32 (float64 for float64), without gradients; one kernel on a CPU."""
    if x.device.type == "cpu":
        from linattn.ops.cpu import linears as cpu

        if cpu.steps_refusal(x, steps) is None:
            return cpu.stepped(x, steps)
    return finished(x, steps)
