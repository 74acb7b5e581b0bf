"""Parts shared by mixers: short convolution, norms, rotary positions."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn.mixers.context import CallContext
from linattn.ops import convolution_step, sharding
from linattn.ops.norms import rms_norm, unit_length
from linattn.ops.short_convolution import short_convolution


def to_float32(t: Tensor) -> Tensor:
    """Convert ``t`` to the dtype of gates, norms and states: float64 stays, every other dtype becomes float32."""
    return t if t.dtype == torch.float64 else t.float()


wide = to_float32  # the earlier name


def unit(x: Tensor, eps: float = 1e-6, dtype: torch.dtype | None = None) -> Tensor:
    """Divide ``x`` by its length over the last axis, √(Σ x² + eps); round to ``dtype``, None: float32 (float64 for float64)."""
    return unit_length(x, eps=eps, dtype=torch.promote_types(x.dtype, torch.float32) if dtype is None else dtype)


def clamp_beta(beta: Tensor, k: Tensor) -> Tensor:
    """Limit ``beta`` [..., H] to 2 / ‖k‖²: rounding may leave k longer than 1, and beyond 2 / ‖k‖² a repeated token grows the state."""
    return torch.minimum(beta, 2 / to_float32(k).square().sum(-1).clamp(min=1))


def rotate(x: Tensor, angles: Tensor, *, interleaved: bool = False) -> Tensor:
    """Turn pairs of channels of ``x`` [B, T, H, K] by ``angles`` [B, T, K / 2] (RoFormer, arXiv 2104.09864).

    Channel i is paired with channel i + K / 2, as in Llama, or, ``interleaved``, channel 2i with 2i + 1, as in RetNet.
    """
    a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
    cos, sin = angles.cos()[:, :, None], angles.sin()[:, :, None]
    turned = (a * cos - b * sin, a * sin + b * cos)
    return (torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)).to(x.dtype)


def head_size(name: str, channels: int, heads: int) -> int:
    """Channels of each head; raise ValueError if ``heads`` does not divide ``channels``."""
    if heads < 1 or channels < heads or channels % heads:
        raise ValueError(f"{name} must be a positive multiple of its heads, but came as {channels} with {heads} heads")
    return channels // heads


def at_least(least: int, **values: float) -> None:
    """Raise ValueError for options below ``least``."""
    for name, value in values.items():
        if value < least:
            raise ValueError(f"{name} must be at least {least}, but came as {value}")


def positive(**values: float) -> None:
    """Raise ValueError for options that are not positive."""
    for name, value in values.items():
        if not value > 0:
            raise ValueError(f"{name} must be positive, but came as {value}")


def check_place(layer: int, layers: int) -> None:
    """Raise ValueError unless 0 <= ``layer`` < ``layers``."""
    if not 0 <= layer < layers:
        raise ValueError(f"layer must be at least 0 and less than layers = {layers}, but came as {layer}")


def time_steps(*shape: int, low: float = 1e-3, high: float = 0.1) -> Tensor:
    """Inverse softplus of time steps drawn log-uniformly from [low, high]; float32."""
    dt = torch.empty(shape, dtype=torch.float32).uniform_(math.log(low), math.log(high)).exp()
    return dt + torch.log(-torch.expm1(-dt))


class ShortConvolution(nn.Module):
    """Causal depthwise convolution over time; ``name`` is its key in the mixer's state ([rows, width - 1, D])."""

    def __init__(self, dim: int, width: int = 4, *, name: str = "conv", bias: bool = False, activation: bool = True) -> None:
        super().__init__()
        if not isinstance(width, int) or isinstance(width, bool) or width < 1:
            raise ValueError(f"conv_width must be an integer of at least 1, but came as {width!r}")
        self.width, self.name, self.activation = width, name, activation
        self.weight = nn.Parameter(torch.empty(dim, 1, width).uniform_(-(width**-0.5), width**-0.5))
        self.bias = nn.Parameter(torch.zeros(dim)) if bias else None

    def forward(self, x: Tensor, call: CallContext | None) -> Tensor:
        """Convolve [B, T, D] -> [B, T, D], then SiLU unless ``activation`` is false. The state holds inputs, not outputs.

        Without a ``call`` the first ``width`` - 1 inputs of x are the tokens before, and have no outputs.
        """
        if call is None:
            old, new = x.tensor_split((self.width - 1,), 1)
            return short_convolution(new, self.weight, self.bias, before=old, activation=self.activation)
        if call.cu_seqlens is None and not call.sharded:
            if (kept := call.recorded(self.name, x)) is not None and self.width > 1:
                y, last = convolution_step.step(x, kept, self.weight, self.bias, self.activation)
                call.keep(self.name, last)
                return y
            before = call.before(self.name, x, self.width - 1)
            return short_convolution(x, self.weight, self.bias, before=before, activation=self.activation)
        longer, places = call.context(self.name, x, self.width - 1)
        with sharding.activated(None):  # x already has the previous tokens
            y = short_convolution(longer, self.weight, self.bias, activation=self.activation)
        return y[:, self.width - 1 :] if places is None else y.index_select(1, places)


class WideLayerNorm(nn.LayerNorm):
    """Layer norm in float32 (float64 for float64): sums, weights and result."""

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else to_float32(self.bias)
        return F.layer_norm(to_float32(x), self.normalized_shape, to_float32(self.weight), bias, self.eps)


class HeadNorm(nn.Module):
    """RMS norm over each head's V channels: [B, T, H, V] -> [B, T, H, V], times the SiLU of ``gate`` if one is given.

    Sums in float32, result in the input's dtype. ``size`` is V, or (H, V) for a weight of its own in each head.
    """

    def __init__(self, size: int | tuple[int, ...], eps: float = 1e-5, affine: bool = True) -> None:
        super().__init__()
        at_least(0, eps=eps)
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size)) if affine else None

    def forward(self, o: Tensor, gate: Tensor | None = None) -> Tensor:
        return rms_norm(o, self.weight, gate, eps=self.eps)
