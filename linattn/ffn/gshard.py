"""GShard (arXiv 2006.16668): two experts per token, the second one sampled."""

from __future__ import annotations

from linattn.ffn.mixture import CAPACITY, ReluExperts
from linattn.mixers.registry import register


@register(
    "gshard",
    title="GShard",
    paper="GShard: Scaling Giant Models with Conditional Computation and Automatic Sharding",
    arxiv="2006.16668",
    year=2020,
    seeds=("001",),
    equation=r"y = \frac{g_1 E_1(x) + g_2 E_2(x)}{g_1 + g_2},\quad g_1 \ge g_2 \text{ the largest of } \mathrm{softmax}(x W_r)",
    kind="feed-forward",
    causal=False,
    linear_in_values=False,
    oracle="mixture-of-experts 0.2.3, MoE",
    exemptions={"feed-forward.leading": CAPACITY},
    families=("sparse",),
    chinese={" the largest of ": " 取最大的两个，出自 "},
)
class GShard(ReluExperts):
    """The two experts with the highest scores, with weights normalised over both; E a feed-forward with ReLU and without biases.

    All first choices of a row get slots before any second one, so in training a token's second expert may depend on later tokens.

    Args:
        dim: width D of the model.
        hidden: inner width of each expert; 4 D by default.
        count: number of experts.
        capacity: an expert takes ⌈capacity · S / count⌉ of a row's S tokens in training; the paper has 2. None: all.
        eval_capacity: the same in evaluation; by default unlimited.
        balance: weight of the load-balancing loss, count Σ_e f_e P_e: the paper's, times count², as the authors' code has it.
        z: weight of the router's z loss (ST-MoE); the paper has none.
        threshold: in training the second expert, of weight g, is dropped with probability 1 - g / threshold; 0: never. The paper
            has 0.5.
    """

    def __init__(
        self, dim: int, hidden: int | None = None, *, count: int = 8, capacity: float | None = 2.0, eval_capacity: float | None = None,
        balance: float = 1e-2, z: float = 0.0, threshold: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__(
            dim, hidden, count=count, active=2, capacity=capacity, eval_capacity=eval_capacity, balance=balance, z=z, threshold=threshold
        )  # fmt: skip
