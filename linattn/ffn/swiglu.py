"""SwiGLU (arXiv 2002.05202, section 2): y = (silu(x W) ⊙ x V) U, without biases."""

from __future__ import annotations

from contextlib import nullcontext

from torch import Tensor, nn

from linattn.mixers import FeedForward
from linattn.mixers.parts import at_least
from linattn.mixers.registry import register
from linattn.ops.gated import gated
from linattn.ops.saved import formed_again


@register(
    "swiglu",
    title="SwiGLU feed-forward",
    paper="GLU Variants Improve Transformer",
    arxiv="2002.05202",
    year=2020,
    equation=r"y = (\mathrm{silu}(x W) \odot x V)\, U",
    kind="feed-forward",
    causal=False,
    linear_in_values=False,
    oracle="transformers, LlamaMLP",
    chinese={"SwiGLU feed-forward": "SwiGLU 前馈层"},
)
class SwiGLU(FeedForward):
    """[.., D] -> [.., D] through ``hidden`` gated channels; by default 8/3 of D, rounded up to a multiple of 32."""

    heads_apart = ()

    def __init__(self, dim: int, hidden: int | None = None) -> None:
        super().__init__(dim)
        hidden = -(-8 * dim // 96) * 32 if hidden is None else hidden
        at_least(1, hidden=hidden)
        self.gate_proj = nn.Linear(dim, hidden, bias=False)
        self.up_proj = nn.Linear(dim, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        self.check_width("x", x)
        gate, up = self.gate_proj(x), self.up_proj(x)
        y = gated(gate, up)
        with formed_again(y, lambda: gated(gate, up)) if y.is_cuda else nullcontext():  # a GPU's memory is what it lacks in training
            return self.down_proj(y)
