"""Counting of floating-point operations with torch's counter, extended by formulas for our operators."""

from __future__ import annotations

from functools import cache
from math import prod
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch.utils.flop_counter import FlopCounterMode

Shape = tuple[int, ...]


def counter() -> FlopCounterMode:
    """Context that counts operations; imports its module on demand, because that loads triton."""
    from torch.utils.flop_counter import FlopCounterMode

    _register_formulas()
    return FlopCounterMode(display=False)


@cache
def _register_formulas() -> None:
    from torch.utils.flop_counter import flop_registry, register_flop_formula, sdpa_backward_flop_count, sdpa_flop_count

    import linattn.ops.short_convolution  # noqa: F401  defines the operators

    @register_flop_formula(torch.ops.linattn.short_convolution)
    def forward(x_shape: Shape, _: object, weight_shape: Shape, *__: object, **___: object) -> int:
        return 2 * prod(x_shape) * weight_shape[2]

    @register_flop_formula(torch.ops.linattn.short_convolution_backward)
    def backward(_: object, x_shape: Shape, __: object, weight_shape: Shape, *___: object, **____: object) -> int:
        return 4 * prod(x_shape) * weight_shape[2]

    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # torch counts only the GPU kernels
    if fused not in flop_registry:

        @register_flop_formula(fused)
        def attention(q_shape: Shape, k_shape: Shape, v_shape: Shape, *_: object, **__: object) -> int:
            return sdpa_flop_count(q_shape, k_shape, v_shape)

        @register_flop_formula(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward)
        def attention_backward(grad_shape: Shape, q_shape: Shape, k_shape: Shape, v_shape: Shape, *_: object, **__: object) -> int:
            return sdpa_backward_flop_count(grad_shape, q_shape, k_shape, v_shape)
