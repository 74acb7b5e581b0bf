"""The feed-forward of Transformers (arXiv 1706.03762, section 3.3) and vision transformers (arXiv 2010.11929): y = f(x W₁ + b₁) W₂ + b₂."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from linattn.mixers import FeedForward
from linattn.mixers.parts import at_least
from linattn.mixers.registry import register

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"gelu": F.gelu, "relu": F.relu}


@register(
    "mlp",
    title="Feed-forward of two layers",
    paper="Attention Is All You Need",
    arxiv="1706.03762",
    year=2017,
    seeds=("002",),
    equation=r"y = f(x W_1 + b_1)\, W_2 + b_2,\quad f = \mathrm{gelu} \text{ or } \mathrm{relu}",
    kind="feed-forward",
    causal=False,
    linear_in_values=False,
    oracle="transformers, ViTMLP; torch, TransformerEncoderLayer",
    chinese={"Feed-forward of two layers": "两层前馈", " or ": " 或 "},
)
class MLP(FeedForward):
    """[.., D] -> [.., D] through ``hidden`` channels, by default 4 D; ``activation``: ``"gelu"``, or ``"relu"`` as in the original."""

    heads_apart = ()

    def __init__(self, dim: int, hidden: int | None = None, *, activation: str = "gelu") -> None:
        super().__init__(dim)
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation must be one of {', '.join(map(repr, ACTIVATIONS))}, but came as {activation!r}")
        hidden = 4 * dim if hidden is None else hidden
        at_least(1, hidden=hidden)
        self.activation = activation
        self.fc1 = nn.Linear(dim, hidden)
        self.fc2 = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        self.check_width("x", x)
        return self.fc2(ACTIVATIONS[self.activation](self.fc1(x)))
