"""Perceiver (arXiv 2103.03206) and Perceiver IO (arXiv 2107.14795): a few latent tokens read an input of any length and process it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn.mixers.context import CallContext
from linattn.mixers.kinds import CrossMixer, Resampler
from linattn.mixers.memory.attention import check_least, softmax_attention
from linattn.mixers.parts import head_size
from linattn.mixers.registry import register


class Layer(nn.Module):
    """Attention and a feed-forward, norms before both: a = o(attention) [+ x], a + dense2(GELU(dense1(norm(a))))."""

    def __init__(self, dim: int, heads: int, widening: int, *, cross: bool, residual: bool = True) -> None:
        super().__init__()
        head_size("dim", dim, heads)
        self.heads, self.residual = heads, residual
        self.norm_q, self.norm_kv = nn.LayerNorm(dim), nn.LayerNorm(dim) if cross else None
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(dim, dim) for _ in range(4))
        self.norm, self.dense1, self.dense2 = nn.LayerNorm(dim), nn.Linear(dim, widening * dim), nn.Linear(widening * dim, dim)

    def forward(self, x: Tensor, source: Tensor | None = None, real: Tensor | None = None) -> Tensor:
        """Attend from ``x`` [B, T, D] to ``source`` [B, S, D] where ``real`` [B, S], or to itself without a source."""
        q = self.norm_q(x)
        kv = q if source is None or self.norm_kv is None else self.norm_kv(source)
        q, k, v = (p(t).unflatten(-1, (self.heads, -1)) for p, t in ((self.q_proj, q), (self.k_proj, kv), (self.v_proj, kv)))
        a = self.o_proj(softmax_attention(q, k, v, real).flatten(-2))
        a = x + a if self.residual else a
        return a + self.dense2(F.gelu(self.dense1(self.norm(a))))


class Latents(nn.Module):
    """Latent tokens and their layers: ``blocks`` times the same ``layers``, with cross attention to the input before ``crosses`` of them.

    The first cross attention has its own weights, all others share theirs.
    """

    def __init__(
        self, dim: int, heads: int, *, latents: int, layers: int, blocks: int, crosses: int, cross_heads: int, widening: int
    ) -> None:  # fmt: skip
        super().__init__()
        check_least(1, latents=latents, blocks=blocks, widening=widening)
        check_least(0, layers=layers)
        self.blocks, self.crosses = blocks, crosses
        self.latents = nn.Parameter(0.02 * torch.randn(latents, dim))
        self.cross = Layer(dim, cross_heads, widening, cross=True)
        self.again = Layer(dim, cross_heads, widening, cross=True) if crosses > 1 else None
        self.layers = nn.ModuleList(Layer(dim, heads, widening, cross=False) for _ in range(layers))

    def forward(self, tokens: Tensor, real: Tensor | None) -> Tensor:
        """Map tokens [B, T, D], ``real`` [B, T], to latents [B, N, D]."""
        z = self.cross(self.latents.repeat(tokens.shape[0], 1, 1), tokens, real)
        for block in range(self.blocks):
            if self.again is not None and 0 < block < self.crosses:
                z = self.again(z, tokens, real)
            for layer in self.layers:
                z = layer(z)
        return z


@register(
    "perceiver",
    title="Perceiver",
    paper="Perceiver: General Perception with Iterative Attention",
    arxiv="2103.03206",
    year=2021,
    seeds=("001",),
    kind="resample",
    causal=False,
    symmetry="permutation",
    linear_in_values=False,  # the tokens read latents that layers have changed
    equation=r"z \leftarrow z + \mathrm{Attention}(z, x),\quad z \leftarrow z + \mathrm{Attention}(z, z) \ \ (L \text{ times}),"
    r"\quad z \in \mathbb{R}^{N \times d},\ x \in \mathbb{R}^{n \times d}",
    oracle="transformers, PerceiverModel's encoder",
    families=("neural memory", "down-sampling"),
    chinese={"PerceiverModel's encoder": "PerceiverModel 的编码器", " times": " 次"},
)
class Perceiver(Resampler):
    """Read n tokens, in any order, into ``latents`` = N: each of ``blocks`` attends to the input with ``cross_heads`` heads and has
    ``layers`` = L layers of self-attention among the latents, all with norms before and a feed-forward ``widening`` times as wide.

    Blocks share their weights, except the first attention to the input (section 3.1 there). Positions are added to the tokens.
    Residuals are inside, since latents are not the tokens. An empty input leaves only the latents to process.
    """

    def __init__(
        self, dim: int, heads: int = 4, *, latents: int = 64, layers: int = 2, blocks: int = 1, cross_heads: int = 1, widening: int = 1
    ) -> None:  # fmt: skip
        super().__init__(dim)
        self.encoder = Latents(
            dim, heads, latents=latents, layers=layers, blocks=blocks, crosses=blocks, cross_heads=cross_heads, widening=widening
        )

    def resampled(self, lengths: Any) -> Any:
        return 0 * lengths + self.encoder.latents.shape[0]

    def mix(self, x: Tensor, call: CallContext) -> Tensor:
        return self.encoder(x, call.valid)


@register(
    "perceiver_io",
    title="Perceiver IO",
    paper="Perceiver IO: A General Architecture for Structured Inputs & Outputs",
    arxiv="2107.14795",
    year=2021,
    seeds=("001",),
    kind="cross",
    causal=False,
    linear_in_values=False,  # the tokens read latents that layers have changed
    equation=r"z = \mathrm{Perceiver}(c),\quad y = \mathrm{Attention}(x, z)",
    oracle="transformers, PerceiverModel's encoder and PerceiverBasicDecoder",
    families=("neural memory", "down-sampling"),
    chinese={"PerceiverModel's encoder and PerceiverBasicDecoder": "PerceiverModel 的编码器与 PerceiverBasicDecoder"},
)
class PerceiverIO(CrossMixer):
    """The context is read once into ``latents``, on which the same ``layers`` work ``blocks`` times; the tokens x attend to the result.

    State: the latents after that, [B, N, D], whatever the length of the context. ``residual`` adds x to what the last attention gives,
    before its feed-forward, as the paper does where outputs are of the kind of queries; a stack of layers adds x itself.
    """

    def __init__(
        self, dim: int, heads: int = 4, *, latents: int = 64, layers: int = 2, blocks: int = 1, cross_heads: int = 1, widening: int = 1,
        residual: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(dim)
        self.encoder = Latents(
            dim, heads, latents=latents, layers=layers, blocks=blocks, crosses=1, cross_heads=cross_heads, widening=widening
        )
        self.decoder = Layer(dim, cross_heads, widening, cross=True, residual=residual)

    def mix(self, x: Tensor, call: CallContext) -> Tensor:
        assert call.across is not None
        z = call.get("latents")
        z = self.encoder(call.across.tokens, call.across.valid) if z is None else z.to(x.dtype)
        call.keep("latents", z)
        return self.decoder(x, z)
