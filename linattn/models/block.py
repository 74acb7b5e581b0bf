"""One block of a stack: a mixer along time, a feed-forward per token, each around a residual."""

from __future__ import annotations

from torch import Tensor, nn

from linattn import ffn, mixers
from linattn.models.config import LMConfig


def norm(config: LMConfig) -> nn.Module:
    """A new norm over the channels."""
    return nn.RMSNorm(config.dim, eps=1e-5) if config.norm == "rms" else nn.LayerNorm(config.dim)


class Block(nn.Module):
    """[B, T, D] -> [B, T, D]. Before-norm: x + f(norm(x)). After-norm: norm(x + f(x))."""

    def __init__(self, config: LMConfig, layer: int) -> None:
        super().__init__()
        name = config.mixer_names[layer]
        self.pre = config.block == "pre"
        self.mixer_norm = norm(config)
        self.mixer = mixers.create(name, dim=config.dim, **config.mixer_options.get(name, {}))
        self.ffn = ffn.create(config.ffn_names[layer], config.dim, config.ffn_dim)
        self.ffn_norm = None if self.ffn is None else norm(config)

    def forward(
        self,
        x: Tensor,
        state: dict[str, Tensor] | None = None,
        *,
        return_state: bool = False,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Tensor] | None]:
        """Returns the output and the mixer's state (None unless asked for)."""
        y = self.mixer(self.mixer_norm(x) if self.pre else x, state, return_state=return_state, mask=mask, cu_seqlens=cu_seqlens)
        y, state = y if return_state else (y, None)
        x = x + y if self.pre else self.mixer_norm(x + y)
        if self.ffn is None or self.ffn_norm is None:
            return x, state
        return (x + self.ffn(self.ffn_norm(x)) if self.pre else self.ffn_norm(x + self.ffn(x))), state
