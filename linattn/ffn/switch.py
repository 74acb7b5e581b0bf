"""Switch (arXiv 2101.03961): every token goes through the one expert that the router scores highest."""

from __future__ import annotations

from torch import Tensor

from linattn.ffn.mixture import CAPACITY, ReluExperts
from linattn.mixers.registry import register


@register(
    "switch",
    title="Switch",
    paper="Switch Transformers: Scaling to Trillion Parameter Models with Simple and Efficient Sparsity",
    arxiv="2101.03961",
    year=2021,
    seeds=("001",),
    equation=r"y = p_i(x)\, E_i(x),\quad i = \mathrm{argmax}_e\, p_e(x),\quad p = \mathrm{softmax}(x W_r),"
    r"\quad E_e(x) = \mathrm{relu}(x U_e) V_e",
    kind="feed-forward",
    causal=False,
    linear_in_values=False,
    oracle="transformers, SwitchTransformersSparseMLP and load_balancing_loss_func; the paper's equations as a loop in float64",
    exemptions={"feed-forward.leading": CAPACITY},
    families=("sparse",),
    chinese={"SwitchTransformersSparseMLP and load_balancing_loss_func": "SwitchTransformersSparseMLP 与 load_balancing_loss_func"},
)
class Switch(ReluExperts):
    """y = p_i(x) E_i(x), E a feed-forward with ReLU and without biases, as in T5.

    Args:
        dim: width D of the model.
        hidden: inner width of each expert; 4 D by default.
        count: number of experts.
        capacity: an expert takes ⌈capacity · S / count⌉ of a row's S tokens in training; the paper has 1.0 to 1.25. None: all.
        eval_capacity: the same in evaluation, where by default no token is dropped: a token's output then is independent of others, and
            decoding
            equals one pass.
        balance: weight of the load-balancing loss.
        z: weight of the router's z loss (ST-MoE); the paper has none.
        jitter: in training the router's inputs are multiplied by random numbers in 1 ± jitter; the paper has 0.01.
    """

    def __init__(
        self, dim: int, hidden: int | None = None, *, count: int = 8, capacity: float | None = 1.25, eval_capacity: float | None = None,
        balance: float = 1e-2, z: float = 0.0, jitter: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__(
            dim, hidden, count=count, active=1, capacity=capacity, eval_capacity=eval_capacity, balance=balance, z=z, jitter=jitter
        )  # fmt: skip

    def weights(self, gates: Tensor) -> Tensor:
        return gates
