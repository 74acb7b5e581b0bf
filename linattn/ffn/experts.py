"""A mixture of experts (arXiv 1701.06538; with shared experts 2401.06066): every token goes through a few of many feed-forwards."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn.ffn.mixture import Mixture
from linattn.ffn.swiglu import SwiGLU
from linattn.mixers.parts import at_least
from linattn.mixers.registry import register

SCORES = ("softmax", "sigmoid")
_RAGGED = "how many tokens an expert gets depends on them, so shapes are not known beforehand"


@register(
    "experts",
    title="Mixture of experts",
    paper="Outrageously Large Neural Networks: The Sparsely-Gated Mixture-of-Experts Layer",
    arxiv="1701.06538",
    year=2017,
    seeds=("002",),
    equation=r"y = \sum_{e \in \mathrm{top}_k(p)} \frac{p_e}{\sum_{e'} p_{e'}} E_e(x),\quad p = \mathrm{softmax}(x W_r)",
    kind="feed-forward",
    causal=False,
    linear_in_values=False,
    oracle="transformers, MixtralSparseMoeBlock; every expert on every token in float64",
    exemptions=dict.fromkeys(("feed-forward.compile", "feed-forward.growth"), _RAGGED),
    families=("sparse",),
    chinese={
        "Mixture of experts": "混合专家",
        "every expert on every token in float64": "float64 下对每个 token 计算每个专家",
        "how many tokens an expert gets depends on them, so shapes are not known beforehand": (
            "每个专家分到多少 token 取决于内容，形状无法事先知道"
        ),
    },
)
class Experts(Mixture):
    """y = Σ_e w_e(x) SwiGLU_e(x) over the ``active`` experts that the router scores highest, plus a shared expert that sees all.

    [.., D] -> [.., D]. ``hidden`` is the inner width of each expert, ``shared`` that of the shared one (0: none), which
    ``shared_gate`` weighs by the sigmoid of a number per token. ``"softmax"`` scores are probabilities over all experts;
    ``"sigmoid"`` scores are independent, and the choice, but not the weight, also depends on ``score_bias``
    (arXiv 2408.15664). ``renormalize`` makes the weights of a token sum to 1, then ``scale`` multiplies them.

    The number of tokens of an expert is data-dependent, so this cannot be part of a compiled full graph. There is no balancing loss.
    """

    def __init__(
        self, dim: int, hidden: int | None = None, *, count: int = 8, active: int = 2, scores: str = "softmax",
        renormalize: bool = True, scale: float = 1.0, shared: int = 0, shared_gate: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(dim, count)
        if not 1 <= active <= count:
            raise ValueError(f"active must be from 1 to count = {count}, but came as {active}")
        if scores not in SCORES:
            raise ValueError(f"scores must be one of {', '.join(map(repr, SCORES))}, but came as {scores!r}")
        at_least(0, shared=shared)
        if shared_gate and not shared:
            raise ValueError("shared_gate needs a shared expert, but shared is 0")
        hidden = -(-8 * dim // 96) * 32 if hidden is None else hidden
        self.active, self.scores, self.renormalize, self.scale = active, scores, renormalize, scale
        if scores == "sigmoid":
            self.register_buffer("score_bias", torch.zeros(count))
        self.gate_proj, self.up_proj, self.down_proj = self.stack(hidden, dim), self.stack(hidden, dim), self.stack(dim, hidden)
        self.shared = SwiGLU(dim, shared) if shared else None
        self.shared_gate = nn.Linear(dim, 1, bias=False) if shared_gate else None

    score_bias: Tensor  # [count]

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        self.check_width("x", x)
        tokens = x.reshape(1, -1, x.shape[-1])  # [1, N, D]
        weights, chosen = self.route(tokens[0])
        back, _ = self.dispatched(tokens, chosen[None], torch.ones_like(chosen[None], dtype=torch.bool), None)
        y = (back[0] * weights[..., None]).sum(1)
        return (y if self.shared is None else y + self._shared(tokens[0], self.shared)).view_as(x)

    def route(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Weights, in the dtype of ``tokens`` [N, D], and numbers of each token's experts, [N, active] both."""
        if self.scores == "softmax":
            scores = self.router(tokens).softmax(-1, dtype=torch.promote_types(tokens.dtype, torch.float32))
            weights, chosen = scores.topk(self.active, -1)
        else:
            wide = torch.promote_types(tokens.dtype, torch.float32)
            scores = F.linear(tokens.to(wide), self.router.weight.to(wide)).sigmoid()
            chosen = (scores + self.score_bias).topk(self.active, -1)[1]
            weights = scores.gather(1, chosen)
        if self.renormalize:
            weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-20)
        return (self.scale * weights).to(tokens.dtype), chosen

    def _shared(self, tokens: Tensor, expert: SwiGLU) -> Tensor:
        y = expert(tokens)
        return y if self.shared_gate is None else self.shared_gate(tokens).sigmoid() * y
