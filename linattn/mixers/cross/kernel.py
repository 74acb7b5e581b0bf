"""Linear attention to a context: the context is summed once, and every query reads the sum.

The feature maps are the Linear Transformer's and those that modular linearized attention (arXiv 2304.08453) chooses from beside softmax.
"""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor

from linattn.mixers.base import Recurrence
from linattn.mixers.context import CallContext
from linattn.mixers.kernel.attention import KernelAttention
from linattn.mixers.kinds import CrossMixer
from linattn.mixers.parts import to_float32
from linattn.mixers.registry import register
from linattn.ops.features import elu1

_PAPER = "Improving Autoregressive NLP Tasks via Modular Linearized Attention"
_LEAST = 0.1  # lower bound of denominators in the paper's code


class CrossKernel(CrossMixer, KernelAttention):
    """Queries of the tokens, keys and values of the context; a subclass implements ``features`` as in :class:`KernelAttention`."""

    normalize: float | str = "return"

    def __init__(self, dim: int, heads: int, *, bias: bool = False) -> None:
        super().__init__(dim, heads, causal=False, bias=bias)

    def project(self, x: Tensor, call: CallContext) -> Recurrence:
        assert call.across is not None
        maps = ((self.q_proj, x), (self.k_proj, call.across.tokens), (self.v_proj, call.across.tokens))
        q, k, v = (project(t).unflatten(-1, (self.heads, -1)) for project, t in maps)
        q, k = self.features(to_float32(q), to_float32(k), call)
        return Recurrence(q, k, v, normalize=self.normalize, scale=1.0)


@register(
    "cross_linear_transformer",
    title="Linear Transformer, to a context",
    paper="Transformers are RNNs: Fast Autoregressive Transformers with Linear Attention",
    arxiv="2006.16236",
    year=2020,
    seeds=("001",),
    equation=r"o_t = \frac{\phi(q_t) \sum_i \phi(k_i)^\top v_i}{\phi(q_t) \sum_i \phi(k_i)^\top + \varepsilon},"
    r"\quad \phi(x) = \mathrm{elu}(x) + 1",
    kind="cross",
    causal=False,
    symmetry="permutation",
    oracle="the quadratic formula in float64, written in the test from the paper's equation",
    chinese={"Linear Transformer, to a context": "Linear Transformer 交叉注意力"},
)
class CrossLinearTransformer(CrossKernel):
    """The state is the pair (S, z) of the context."""

    normalize = 1e-6

    def __init__(self, dim: int, heads: int = 4) -> None:
        super().__init__(dim, heads)

    def features(self, q: Tensor, k: Tensor, call: CallContext) -> tuple[Tensor, Tensor]:
        return elu1(q), elu1(k)


@register(
    "cross_relu_attention",
    title="Simple ReLU attention, to a context",
    paper=_PAPER,
    arxiv="2304.08453",
    year=2023,
    seeds=("001",),
    equation=r"o_t = \frac{\phi(q_t) \sum_i \phi(k_i)^\top v_i}{\max(\phi(q_t) \sum_i \phi(k_i)^\top, 0.1)},\quad \phi(x) = \max(x, 0)",
    kind="cross",
    causal=False,
    symmetry="permutation",
    oracle="the quadratic formula in float64, and figures of the authors' simple_attn_baseline_infer",
    chinese={
        "Simple ReLU attention, to a context": "简单 ReLU 交叉注意力",
        "and figures of the authors' simple_attn_baseline_infer": "以及作者的 simple_attn_baseline_infer 算出的数",
    },
)
class CrossReLUAttention(CrossKernel):
    """Attention without a scale; the division is by at least 0.1, so a query with few matches gives a small output."""

    def __init__(self, dim: int, heads: int = 4) -> None:
        super().__init__(dim, heads, bias=True)

    def features(self, q: Tensor, k: Tensor, call: CallContext) -> tuple[Tensor, Tensor]:
        return q.relu(), k.relu()

    def guard(self, denominator: Tensor) -> Tensor:
        return denominator.clamp_min(_LEAST)


@register(
    "cross_cosformer",
    title="cosFormer, to a context, with an estimate of the target's length",
    paper=_PAPER,
    arxiv="2304.08453",
    year=2023,
    seeds=("001",),
    equation=r"o_t = \frac{\sum_i s_{ti} v_i}{\max(\sum_i s_{ti}, 0.1)},\quad s_{ti} = \mathrm{ReLU}(q_t)\, \mathrm{ReLU}(k_i)^\top"
    r"\cos\left(\frac{\pi}{2} \left(\frac{t}{\rho n} - \frac{i}{n}\right)\right)",
    kind="cross",
    causal=False,
    oracle="the quadratic formula in float64, and figures of the authors' cosformer_attn_cache_infer",
    chinese={
        "cosFormer, to a context, with an estimate of the target's length": "cosFormer 交叉注意力，目标长度靠估计",
        "and figures of the authors' cosformer_attn_cache_infer": "以及作者的 cosformer_attn_cache_infer 算出的数",
    },
)
class CrossCosFormer(CrossKernel):
    """Position of a query relative to an estimated target length: ρ = ``ratio`` times the n tokens of the context.

    A decoder does not know the final length, so the paper estimates it. Positions beyond the estimate get negative weights in the
    authors' code; here they are clamped to its end. State: S, z and n, ``length`` [B].
    """

    def __init__(self, dim: int, heads: int = 4, *, ratio: float = 1.0) -> None:
        super().__init__(dim, heads, bias=True)
        if not 0 < ratio < math.inf:
            raise ValueError(f"ratio must be a number above 0, target tokens for each of the context, but came as {ratio}")
        self.ratio = ratio

    def features(self, q: Tensor, k: Tensor, call: CallContext) -> tuple[Tensor, Tensor]:
        n = self._length(k, call)
        call.keep("length", n)
        n = n.clamp(min=1).to(q.dtype)[:, None]
        places = torch.arange(1, k.shape[1] + 1, device=k.device) / n  # [B, T]
        expected = ((call.positions + 1) / (self.ratio * n)).clamp(max=1.0)  # [B, Tq]
        return _turned(q.relu(), expected), _turned(k.relu(), places)

    def _length(self, k: Tensor, call: CallContext) -> Tensor:
        if not call.fresh:
            return cast(Tensor, call.get("length"))
        assert call.across is not None
        valid = call.across.valid
        return torch.full(k.shape[:1], k.shape[1], device=k.device) if valid is None else valid.sum(1)

    def guard(self, denominator: Tensor) -> Tensor:
        return denominator.clamp_min(_LEAST)


def _turned(x: Tensor, share: Tensor) -> Tensor:
    """Multiply x [B, T, H, K] by sine and cosine of ``share`` [B, T] times π / 2: [B, T, H, 2 K]."""
    angles = (math.pi / 2 * share.to(x.dtype))[..., None, None]
    return torch.cat([x * angles.sin(), x * angles.cos()], -1)
