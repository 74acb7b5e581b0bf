"""ST-MoE (arXiv 2202.08906): two gated experts per token, and a loss on the router's logits for stability."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from linattn.ffn.mixture import CAPACITY, Routed
from linattn.mixers.registry import register


@register(
    "st_moe",
    title="ST-MoE",
    paper="ST-MoE: Designing Stable and Transferable Sparse Expert Models",
    arxiv="2202.08906",
    year=2022,
    seeds=("001",),
    equation=r"y = \frac{g_1 E_1(x) + g_2 E_2(x)}{g_1 + g_2},\quad E_e(x) = (\mathrm{gelu}(x G_e) \odot x U_e) V_e,\quad"
    r" L_z = \frac{1}{n} \sum_t \Big(\log \sum_e \exp (x_t W_r)_e\Big)^2",
    kind="feed-forward",
    causal=False,
    linear_in_values=False,
    oracle="st-moe-pytorch 0.1.8, MoE",
    exemptions={"feed-forward.leading": CAPACITY},
    families=("sparse",),
)
class STMoE(Routed):
    """GShard with GEGLU experts and the z loss. The paper adds a dense feed-forward after a sparse one: another layer of the stack.

    Args:
        dim: width D of the model.
        hidden: inner width of each expert; 8/3 of D by default, rounded up to a multiple of 32.
        count: number of experts.
        capacity: an expert takes ⌈capacity · S / count⌉ of a row's S tokens in training. None: all.
        eval_capacity: the same in evaluation; by default unlimited; the paper has 2.0.
        balance: weight of the load-balancing loss.
        z: weight of the z loss.
        threshold: in training the second expert, of weight g, is dropped with probability 1 - g / threshold; 0: never. The paper
            has 0.2.
    """

    def __init__(
        self, dim: int, hidden: int | None = None, *, count: int = 8, capacity: float | None = 1.25, eval_capacity: float | None = None,
        balance: float = 1e-2, z: float = 1e-3, threshold: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__(
            dim, count=count, active=2, capacity=capacity, eval_capacity=eval_capacity, balance=balance, z=z, threshold=threshold
        )  # fmt: skip
        hidden = -(-8 * dim // 96) * 32 if hidden is None else hidden
        self.gate_proj, self.up_proj, self.down_proj = self.stack(hidden, dim), self.stack(hidden, dim), self.stack(dim, hidden)

    def expert(self, x: Tensor, *weights: Tensor) -> Tensor:
        gate, up, down = weights
        return (F.gelu(x @ gate.mT) * (x @ up.mT)) @ down.mT
