"""Product-key memory (arXiv 1907.05242): a large table of values, looked up through products of two small sets of keys."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn.mixers import FeedForward
from linattn.mixers.parts import head_size
from linattn.mixers.registry import register

NORMS = ("layer", "batch", "none")


@register(
    "product_key_memory",
    title="Product-key memory",
    paper="Large Memory Layers with Product Keys",
    arxiv="1907.05242",
    year=2019,
    seeds=("001",),
    equation=r"s_{hij} = q_h^1 {c_h^i}^\top + q_h^2 {c_h'^j}^\top,\quad"
    r" y = \sum_{h} \sum_{(i, j) \in I_h} \mathrm{softmax}_{I_h}(s_{hij})\, v_{i n + j},\quad (q_h^1, q_h^2) = \mathrm{norm}(x W_h)",
    kind="feed-forward",
    causal=False,
    linear_in_values=False,
    oracle="product-key-memory 0.3.0, PKM; every key against every query in float64",
    families=("sparse",),
    chinese={"Product-key memory": "乘积键记忆", "every key against every query in float64": "float64 下每个查询逐一比较每个键"},
)
class ProductKeyMemory(FeedForward):
    """Heads look up the ``active`` best of n² keys, each a pair of one of n keys for either half of the query; their values are added up.

    The best pairs are among the best of either half, so that 2 n + active² products find them exactly among n² keys. All heads read
    one table of values, whose gradient is 0 except in the selected rows.

    Args:
        dim: width D of the model.
        hidden: number n² of values, a square; 128² by default, the paper has 512².
        heads: H; their results are added up.
        active: values that a head takes.
        key_dim: channels of either half of a query.
        norm: norm of each query half: ``"layer"``, ``"none"``, or ``"batch"`` as in the paper, which in training averages over
            all tokens of the batch, including later ones.
    """

    def __init__(
        self, dim: int, hidden: int | None = None, *, heads: int = 4, active: int = 32, key_dim: int = 128, norm: str = "layer"
    ) -> None:
        super().__init__(dim)
        hidden = 128**2 if hidden is None else hidden
        self.keys_each = math.isqrt(max(hidden, 0))
        if hidden < 1 or self.keys_each**2 != hidden:
            raise ValueError(f"hidden must be the number of values, the square of that of the keys, but came as {hidden}")
        if not 1 <= active <= self.keys_each:
            raise ValueError(f"active must be from 1 to the {self.keys_each} keys of a half, but came as {active}")
        if norm not in NORMS:
            raise ValueError(f"norm must be one of {', '.join(map(repr, NORMS))}, but came as {norm!r}")
        self.heads, self.active = heads, active
        self.q_proj = nn.Linear(dim, 2 * heads * head_size("heads * key_dim", heads * key_dim, heads), bias=False)
        kinds = {"layer": nn.LayerNorm, "batch": nn.BatchNorm1d, "none": nn.Identity}
        self.q_norm = kinds[norm](key_dim)
        values = torch.empty(hidden, dim)  # first, so that sizes beyond memory fail at once
        self.keys = nn.Parameter(torch.randn(heads, self.keys_each, 2, key_dim) * key_dim**-0.5)
        self.values = nn.Parameter(values.normal_() * dim**-0.5)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        self.check_width("x", x)
        tokens = x.reshape(-1, x.shape[-1])
        scores, index = self.found(tokens)  # [N, H, active] both
        weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(self.values.dtype)
        y = F.embedding_bag(index.flatten(1), self.values, per_sample_weights=weights.flatten(1), mode="sum")
        return y.to(x.dtype).view(x.shape)

    def found(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Highest scores of each head's pairs of keys for ``tokens`` [N, D], and the numbers of their values: [N, H, active]."""
        q = self.q_proj(tokens).unflatten(-1, (2, self.heads, -1))  # [N, 2, H, K]
        q = self.q_norm(q.flatten(0, 2)).view(q.shape)
        halves, place = torch.einsum("nphk,hipk->nphi", q, self.keys.to(q.dtype)).topk(self.active, -1)  # [N, 2, H, active]
        pairs = halves[:, 0, :, :, None] + halves[:, 1, :, None]  # [N, H, active, active]
        number = self.keys_each * place[:, 0, :, :, None] + place[:, 1, :, None]
        scores, best = pairs.flatten(2).topk(self.active, -1)
        return scores, number.flatten(2).gather(-1, best)
