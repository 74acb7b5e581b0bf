"""The Linear Transformer (arXiv 2006.16236): a positive feature map on queries and keys, and division by its sum."""

from __future__ import annotations

from torch import Tensor, nn

from linattn.mixers.base import Mixer, Recurrence
from linattn.mixers.carry import Carry
from linattn.mixers.parts import head_size, wide
from linattn.mixers.registry import register
from linattn.ops.features import elu1


@register(
    "linear_transformer",
    title="Linear Transformer",
    paper="Transformers are RNNs: Fast Autoregressive Transformers with Linear Attention",
    arxiv="2006.16236",
    year=2020,
    seeds=("000", "001", "003", "004"),
    equation=r"S_t = S_{t-1} + \phi(k_t)^\top v_t,\quad z_t = z_{t-1} + \phi(k_t),\quad"
    r" o_t = \frac{\phi(q_t) S_t}{\phi(q_t) z_t^\top + \varepsilon},\quad \phi(x) = \mathrm{elu}(x) + 1",
    oracle="fla-core 0.6.0, naive_recurrent_linear_attn with normalisation",
)
class LinearTransformer(Mixer):
    """The state is the pair (S, z); a row of the mixing matrix is positive and sums to one, as in softmax (section 3.2)."""

    def __init__(self, dim: int, heads: int = 4) -> None:
        super().__init__(dim)
        head_size("dim", dim, heads)
        self.heads = heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(dim, dim, bias=False) for _ in range(4))

    def project(self, x: Tensor, state: Carry) -> Recurrence:
        q, k, v = (p(x).unflatten(-1, (self.heads, -1)) for p in (self.q_proj, self.k_proj, self.v_proj))
        return Recurrence(elu1(wide(q)), elu1(wide(k)), v, normalize=1e-6, scale=1.0)

    def read(self, o: Tensor, x: Tensor) -> Tensor:
        return self.o_proj(o.flatten(-2))
