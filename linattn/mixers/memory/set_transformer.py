"""Set Transformer (arXiv 1810.00825): attention within a set through inducing points, and pooling by seeds."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from linattn.mixers.base import Mixer
from linattn.mixers.context import CallContext
from linattn.mixers.kinds import Resampler
from linattn.mixers.memory.attention import check_least, softmax_attention
from linattn.mixers.parts import head_size
from linattn.mixers.registry import register


class MAB(nn.Module):
    """MAB(X, Y) = norm(H + relu(W H)), H = norm(Q + softmax(Q Kᵀ / √D) V): section 3.1, with the names of the authors' code.

    As there the residual is the projected X, and the scale uses the whole width, not a head's.
    """

    def __init__(self, dim: int, heads: int, norm: bool) -> None:
        super().__init__()
        head_size("dim", dim, heads)
        self.heads = heads
        self.fc_q, self.fc_k, self.fc_v, self.fc_o = (nn.Linear(dim, dim) for _ in range(4))
        self.ln0, self.ln1 = (nn.LayerNorm(dim) if norm else nn.Identity() for _ in range(2))

    def forward(self, x: Tensor, y: Tensor, real: Tensor | None = None) -> Tensor:
        """Attend from x [B, T, D] to y [B, S, D] where ``real`` [B, S]."""
        mapped = [self.fc_q(x), self.fc_k(y), self.fc_v(y)]
        q, k, v = (t.unflatten(-1, (self.heads, -1)) for t in mapped)
        o = softmax_attention(q, k, v, real, scale=mapped[0].shape[-1] ** -0.5)
        h = self.ln0((q + o).flatten(-2))
        return self.ln1(h + self.fc_o(h).relu())


def points(count: int, dim: int) -> nn.Parameter:
    """Learned elements [1, count, D]."""
    return nn.Parameter(nn.init.xavier_uniform_(torch.empty(1, count, dim)))


@register(
    "set_transformer",
    title="Set Transformer (SAB, ISAB)",
    paper="Set Transformer: A Framework for Attention-based Permutation-Invariant Neural Networks",
    arxiv="1810.00825",
    year=2018,
    seeds=("001",),
    causal=False,
    symmetry="permutation",
    linear_in_values=False,  # a feed-forward follows each of the two attentions
    equation=r"\mathrm{ISAB}(X) = \mathrm{MAB}(X, \mathrm{MAB}(I, X)),\quad \mathrm{SAB}(X) = \mathrm{MAB}(X, X),\quad"
    r" \mathrm{MAB}(X, Y) = \mathrm{LN}(H + \mathrm{rFF}(H)),\quad H = \mathrm{LN}(X + \mathrm{Attention}(X, Y, Y))",
    oracle="the authors' modules.py, in float64",
)
class SetTransformer(Mixer):
    """The block with ``inducing`` = m points I, ISAB: O(n m). ``inducing=None`` is SAB, in which every element attends to all: O(n²).

    Residuals and feed-forwards are inside; ``norm=False`` leaves the layer norms out, as the authors' code does by default.
    """

    packs = False

    def __init__(self, dim: int, heads: int = 4, *, inducing: int | None = 32, norm: bool = True) -> None:
        super().__init__(dim)
        if inducing is None:
            self.mab = MAB(dim, heads, norm)
            return
        check_least(1, inducing=inducing)
        self.I = points(inducing, dim)
        self.mab0, self.mab1 = (MAB(dim, heads, norm) for _ in range(2))

    def mix(self, x: Tensor, call: CallContext) -> Tensor:
        if hasattr(self, "mab"):
            return self.mab(x, x, call.valid)
        return self.mab1(x, self.mab0(self.I.repeat(x.shape[0], 1, 1), x, call.valid))


@register(
    "pma",
    title="Set Transformer's pooling (PMA)",
    paper="Set Transformer: A Framework for Attention-based Permutation-Invariant Neural Networks",
    arxiv="1810.00825",
    year=2018,
    seeds=("001",),
    kind="resample",
    causal=False,
    symmetry="permutation",
    linear_in_values=False,  # a feed-forward follows the attention
    equation=r"\mathrm{PMA}(X) = \mathrm{MAB}(S, X),\quad S \in \mathbb{R}^{k \times d}",
    oracle="the authors' modules.py, in float64",
    chinese={"Set Transformer's pooling (PMA)": "Set Transformer 的池化（PMA）"},
)
class PMA(Resampler):
    """``seeds`` = k learned elements S attend to the set: k tokens from any number of elements, in any order.

    The feed-forward that the paper has before it is left to the stack, as it is in the authors' modules.
    """

    def __init__(self, dim: int, heads: int = 4, *, seeds: int = 1, norm: bool = True) -> None:
        super().__init__(dim)
        check_least(1, seeds=seeds)
        self.S, self.mab = points(seeds, dim), MAB(dim, heads, norm)

    def resampled(self, lengths: Any) -> Any:
        return 0 * lengths + self.S.shape[1]

    def mix(self, x: Tensor, call: CallContext) -> Tensor:
        return self.mab(self.S.repeat(x.shape[0], 1, 1), x, call.valid)
