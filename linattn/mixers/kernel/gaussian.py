"""Gaussian kernel attention (arXiv 1908.11775): exp(-‖q - k‖² / 2) in place of exp(q·k), by positive random features."""

from __future__ import annotations

import torch
from torch import Tensor

from linattn.mixers.kernel.performer import RandomFeatures
from linattn.mixers.registry import register


@register(
    "gaussian",
    title="Gaussian kernel attention",
    paper="Transformer Dissection: A Unified Understanding of Transformer's Attention via the Lens of Kernel",
    arxiv="1908.11775",
    year=2019,
    seeds=("001",),
    equation=r"o_t \approx \frac{\sum_{i \le t} \exp(-\lVert q_t - k_i \rVert^2 / 2 \sigma^2 \sqrt d)\, v_i}"
    r"{\sum_{i \le t} \exp(-\lVert q_t - k_i \rVert^2 / 2 \sigma^2 \sqrt d)},"
    r"\quad \phi(x) = \frac{1}{\sqrt m} \exp(W x - \lVert x \rVert^2),\quad x \leftarrow x / \sigma d^{1/4}",
    symmetry="permutation",
    oracle="the exact kernel in float64, written in the test: averages of the features, and their formula",
    chinese={
        "Gaussian kernel attention": "高斯核注意力",
        "the exact kernel in float64, written in the test: averages of the features, and their formula": (
            "测试中以 float64 写出的精确核：特征的平均，及其公式"
        ),
    },
)
class Gaussian(RandomFeatures):
    """exp(-‖q - k‖² / 2) is exp(q·k) times a factor of each side. The query's factor cancels; the key's makes long keys weigh less
    than in softmax. Random features by the lemma of the Performer (arXiv 2009.14794), which are positive where Fourier features are not.
    """

    def __init__(
        self, dim: int, heads: int = 4, *, sigma: float = 1.0, random_features: int | None = None, eps: float = 1e-4, causal: bool = True
    ) -> None:
        super().__init__(dim, heads, causal, random_features=random_features, eps=eps)
        if not sigma > 0:
            raise ValueError(f"sigma must be positive, but came as {sigma}")
        self.sigma = sigma

    def exponents(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        q, k = (t * (self.feature_dim**-0.25 / self.sigma) for t in (q, k))
        w = self.projection.to(q.dtype).T
        return q @ w, k @ w, torch.zeros_like(q[..., :1]), k.square().sum(-1, keepdim=True)
