"""One block of a stack: a mixer along time, a feed-forward per token, each around a residual."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from linattn import mixers
from linattn.mixers.norms import RMSNorm, ZeroCenteredRMSNorm
from linattn.models.config import LMConfig


def norm(config: LMConfig) -> nn.Module:
    """Create a norm over the channels."""
    kinds = {"rms": RMSNorm, "zero_centered_rms": ZeroCenteredRMSNorm, "layer": nn.LayerNorm}
    return kinds[config.norm](config.dim, eps=config.norm_eps)


class Block(nn.Module):
    """Block of a mixer and a feed-forward, [B, T, D] -> [B, T, D].

    Pre-norm: x + f(norm(x)). Post-norm: norm(x + f(x)). Normed: y + f(y), y = norm(x). Sandwich: x + norm(f(norm(x))), where each
    norm has its own weight.

    Reversible: [B, T, 2 D] -> [B, T, 2 D], see :mod:`linattn.models.reversible`.
    """

    def __init__(self, config: LMConfig, layer: int) -> None:
        super().__init__()
        name, ffn_name = config.mixer_names[layer], config.ffn_names[layer]
        self.kind = config.block
        self.scales, self.ffn_scales = (config.residual_scales.get(n) for n in (name, ffn_name))
        self.mixer_norm = norm(config)
        self.mixer = mixers.create(name, dim=config.dim, **config.options_of(layer))
        self.ffn = config.feed_forward(layer)
        self.ffn_norm = None if self.ffn is None else norm(config)
        sandwich = self.kind == "sandwich"
        self.mixer_post_norm = norm(config) if sandwich else None
        self.ffn_post_norm = norm(config) if sandwich and self.ffn is not None else None

    def forward(
        self,
        x: Tensor,
        state: dict[str, Tensor] | None = None,
        shared: Tensor | None = None,
        *,
        return_state: bool = False,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Tensor] | None, Tensor | None]:
        """Run the block. ``shared`` is the tensor passed on by the previous block with the same mixer, if any.

        Returns the output, the mixer's state (None unless requested) and the tensor to pass on.
        """
        if self.kind == "reversible":
            first, second = x.chunk(2, -1)
            f = self.mixer_branch(second, state, return_state=return_state, mask=mask, cu_seqlens=cu_seqlens)
            f, state = f if return_state else (f, None)
            first = first + f
            return torch.cat([first, second + self.ffn_branch(first)], -1), state, None
        sharing = {"shared": shared, "return_shared": True} if self.mixer.shares else {}
        inner = x if self.kind == "post" else self.mixer_norm(x)
        y = self.mixer(inner, state, return_state=return_state, mask=mask, cu_seqlens=cu_seqlens, **sharing)
        y, state, shared = y if sharing else (*y, None) if return_state else (y, None, None)
        y = y if self.mixer_post_norm is None else self.mixer_post_norm(y)
        x = self._sum(x, inner, y, self.mixer_norm, self.scales)
        if self.ffn is None or self.ffn_norm is None:
            return x, state, shared
        inner = x if self.kind == "post" else self.ffn_norm(x)
        y = self.ffn(inner)
        y = y if self.ffn_post_norm is None else self.ffn_post_norm(y)
        return self._sum(x, inner, y, self.ffn_norm, self.ffn_scales), state, shared

    def mixer_branch(self, x: Tensor, state: dict[str, Tensor] | None = None, **how: Any) -> Any:
        """Output of the mixer's branch of a reversible block, and its state if requested."""
        return self.mixer(self.mixer_norm(x), state, **how)

    def ffn_branch(self, x: Tensor) -> Tensor:
        """Output of the feed-forward branch of a reversible block."""
        assert self.ffn is not None
        assert self.ffn_norm is not None
        return self.ffn(self.ffn_norm(x))

    def _sum(self, x: Tensor, inner: Tensor, y: Tensor, norm: nn.Module, scales: list[float] | None) -> Tensor:
        """Add a branch ``y`` = f(inner) to ``x``."""
        past = inner if self.kind == "normed" else x
        x = past + y if scales is None else scales[0] * past + scales[1] * y
        return norm(x) if self.kind == "post" else x
