"""Hedgehog (arXiv 2402.04347): a small learned map per head, and the softmaxes of its output and of its negative."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from linattn.mixers.context import CallContext
from linattn.mixers.kernel.attention import KernelAttention
from linattn.mixers.parts import to_float32
from linattn.mixers.registry import register
from linattn.ops.features import both_softmaxes

_FLOOR = 1e-12  # of a feature, as in the authors' code


@register(
    "hedgehog",
    title="Hedgehog",
    paper="The Hedgehog & the Porcupine: Expressive Linear Attentions with Softmax Mimicry",
    arxiv="2402.04347",
    year=2024,
    seeds=("001",),
    equation=r"o_t = \frac{\phi_q(q_t) S_t}{\phi_q(q_t) z_t^\top + \varepsilon},"
    r"\quad \phi(x) = [\mathrm{softmax}(x W), \mathrm{softmax}(-x W)]",
    symmetry="permutation",
    oracle="fla-core 0.6.0, naive_recurrent_linear_attn on features written in the test; the quadratic formula in float64",
    chinese={"naive_recurrent_linear_attn on features written in the test": "naive_recurrent_linear_attn，特征在测试中写出"},
)
class Hedgehog(KernelAttention):
    """``q_map`` and ``k_map`` [H, d, d] start as the identity. In the paper they are first distilled from a model's softmax attention.

    Checked in the authors' code: maps without bias, separate for each head and for queries and keys; a softmax of each sign, clamped at
    1e-12. (Another implementation takes one softmax over both signs together.)
    """

    normalize = 1e-12

    def __init__(self, dim: int, heads: int = 4, *, causal: bool = True) -> None:
        super().__init__(dim, heads, causal)
        identity = torch.eye(self.feature_dim).expand(heads, -1, -1)
        self.q_map, self.k_map = (nn.Parameter(identity.clone()) for _ in range(2))

    def features(self, q: Tensor, k: Tensor, call: CallContext) -> tuple[Tensor, Tensor]:
        mapped = (torch.einsum("bthd,hdf->bthf", x, to_float32(w)) for x, w in ((q, self.q_map), (k, self.k_map)))
        q, k = (both_softmaxes(x).clamp_min(_FLOOR) for x in mapped)
        return q, k
