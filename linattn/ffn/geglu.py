"""GEGLU (arXiv 2002.05202, section 2): y = (gelu(x W) ⊙ x V) U, with GELU by its tanh formula, as in Gemma and Griffin."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from linattn.mixers import FeedForward
from linattn.mixers.parts import at_least
from linattn.mixers.registry import register


@register(
    "geglu",
    title="GEGLU feed-forward",
    paper="GLU Variants Improve Transformer",
    arxiv="2002.05202",
    year=2020,
    equation=r"y = (\mathrm{gelu}(x W) \odot x V)\, U",
    kind="feed-forward",
    causal=False,
    linear_in_values=False,
    oracle="transformers, GemmaMLP",
    chinese={"GEGLU feed-forward": "GEGLU 前馈层"},
)
class GeGLU(FeedForward):
    """[.., D] -> [.., D] through ``hidden`` gated channels, by default 3 of D (arXiv 2402.19427, section 2.2)."""

    heads_apart = ()

    def __init__(self, dim: int, hidden: int | None = None, *, bias: bool = False) -> None:
        super().__init__(dim)
        hidden = 3 * dim if hidden is None else hidden
        at_least(1, hidden=hidden)
        self.gate_proj, self.up_proj = (nn.Linear(dim, hidden, bias=bias) for _ in range(2))
        self.down_proj = nn.Linear(hidden, dim, bias=bias)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        self.check_width("x", x)
        return self.down_proj(F.gelu(self.gate_proj(x), approximate="tanh") * self.up_proj(x))
