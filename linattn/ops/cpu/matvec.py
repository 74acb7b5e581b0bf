"""The linear layer of one token: a matrix of 16 bits a number is read at the speed of memory, which torch's product leaves half unused."""

from __future__ import annotations

from torch import Tensor

from linattn.ops.cpu import library


def refusal(x: Tensor, weight: Tensor) -> str | None:
    """Why :func:`matvec` does not take them, or None if it does."""
    if x.numel() != x.shape[-1]:
        return f"for more than one vector a matrix product is faster, and x has shape {list(x.shape)}"
    if x.dtype != weight.dtype:
        return f"both must have one dtype, but x is {x.dtype} and weight {weight.dtype}"
    if library.wanted(x, weight):
        return "it has no gradients"
    if library.traced(x, weight):
        return "it is no operator that a compiler could see"
    return library.refusal(x, weight)


def matvec(x: Tensor, weight: Tensor) -> Tensor:
    """``x`` [1, ..., K] times the transpose of ``weight`` [N, K]: [1, ..., N] in their dtype, summed in float32."""
    weight = weight if weight.stride(1) == 1 else weight.contiguous()
    y = library.empty((*x.shape[:-1], weight.shape[0]), x.dtype)
    library.call("matvec", weight, x.contiguous(), y, library.DTYPES[x.dtype], *weight.shape, weight.stride(0))
    return y
