"""Short convolution of queries, keys and values in one, with SiLU, after which the heads of queries and keys have unit length.

On a GPU it is one kernel each way, also in compiled graphs, for heads of as many channels as a program of the short convolution has;
elsewhere it is the short convolution and two divisions by lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from linattn.ops import checks, dispatch, sharding, tracing
from linattn.ops.norms import unit_length
from linattn.ops.operator import Operator, Pass
from linattn.ops.short_convolution import _check as short_convolution_checks
from linattn.ops.short_convolution import short_convolution

EPS = 1e-6


def unit_convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, before: Tensor | None = None, sizes: Sequence[int], head: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Convolve ``x`` as :func:`linattn.ops.short_convolution.short_convolution` and divide heads of q and k by √(Σ x² + 1e-6).

    Args:
        x: [B, T, D].
        weight, bias, before: as there.
        sizes: channels of q, k and v, D together.
        head: channels of a head of q and k.

    Returns:
        q and k [B, T, heads, head] and v [B, T, channels], in the dtype of x.
    """
    short_convolution_checks(x, weight, bias, before, True)
    if dispatch.choose("auto", _refusal, x, weight, bias, before, tuple(sizes), head) != "triton":
        return portable(x, before, weight, bias, sizes, head)
    with checks.no_autocast(x):
        q, k, v = KERNELS(x, before, weight, bias, *sizes[:2], EPS)
    return q.unflatten(-1, (-1, head)), k.unflatten(-1, (-1, head)), v


def portable(
    x: Tensor, before: Tensor | None, weight: Tensor, bias: Tensor | None, sizes: Sequence[int], head: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the same by the operations that it consists of."""
    return divided(short_convolution(x, weight, bias, before=before), sizes, head)


def divided(y: Tensor, sizes: Sequence[int], head: int) -> tuple[Tensor, Tensor, Tensor]:
    """Split ``y`` [B, T, D], and divide the heads of q and k by their lengths."""
    q, k, v = y.split(tuple(sizes), -1)
    q, k = (unit_length(t.unflatten(-1, (-1, head)), eps=EPS, dtype=t.dtype) for t in (q, k))
    return q, k, v


def _refusal(
    name: str, asked: bool, x: Tensor, weight: Tensor, bias: Tensor | None, before: Tensor | None, sizes: tuple[int, ...], head: int
) -> str | None:  # fmt: skip
    if name == "torch":
        return None
    if name != "triton":
        return "it is composed of the short convolution and of norms, which have kernels"
    if (reason := dispatch.gpu_refusal(x, asked)) is not None:
        return reason
    if sharding.active() is not None or tracing.foreign(x, weight, bias, before) or not x.numel():
        return "the short convolution and the norms run one after the other"
    if tracing.traced(x) and not torch.compiler.is_compiling():
        return "tracing is active, which needs PyTorch operations"
    return _load().unit_refusal(x, weight, sizes, head)


def _load() -> Any:
    from linattn.ops.triton import short_convolution as gpu

    return gpu


class _Unit:
    """Kernels by the names of an operator."""

    @staticmethod
    def forward(*arguments: Any) -> Any:
        return _load().unit_forward(*arguments)

    @staticmethod
    def backward(*arguments: Any) -> Any:
        return _load().unit_backward(*arguments)

    @staticmethod
    def outputs(x: Tensor, _: Any, __: Any, ___: Any, q: int, k: int, ____: Any) -> Any:
        return tuple(x.new_empty(*x.shape[:2], n) for n in (q, k, x.shape[2] - q - k))

    @staticmethod
    def gradients(_: Any, __: Any, ___: Any, *arguments: Any) -> Any:
        return [None if t is None else t.new_empty(t.shape) for t in arguments[:4]]


_INPUTS = "Tensor x, Tensor? before, Tensor weight, Tensor? bias, int q_channels, int k_channels, float eps"
KERNELS = Operator(
    lambda: _Unit,
    Pass(f"({_INPUTS}) -> (Tensor, Tensor, Tensor)", "unit_convolution"),
    Pass(f"(Tensor d_q, Tensor? d_k, Tensor? d_v, {_INPUTS}) -> (Tensor, Tensor, Tensor, Tensor)", "unit_convolution_backward"),
    "q k v", "x before weight bias", "q", once="linattn::unit_convolution has no gradients of gradients",
)  # fmt: skip
