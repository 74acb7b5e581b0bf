"""The Linear Transformer (arXiv 2006.16236): a positive feature map on queries and keys, and division by its sum."""

from __future__ import annotations

from torch import Tensor

from linattn.mixers.context import CallContext
from linattn.mixers.kernel.attention import KernelAttention
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
    symmetry="permutation",
    oracle="fla-core 0.6.0, naive_recurrent_linear_attn with normalisation",
    families=("kernels", "low rank"),
    chinese={"naive_recurrent_linear_attn with normalisation": "做归一化的 naive_recurrent_linear_attn"},
)
class LinearTransformer(KernelAttention):
    """The state is the pair (S, z); a row of the mixing matrix is positive and sums to one, as in softmax (section 3.2).

    ``causal=False`` is the paper's encoder for speech recognition (section 4.3).
    """

    def __init__(self, dim: int, heads: int = 4, *, causal: bool = True) -> None:
        super().__init__(dim, heads, causal)

    def features(self, q: Tensor, k: Tensor, call: CallContext) -> tuple[Tensor, Tensor]:
        return elu1(q), elu1(k)
