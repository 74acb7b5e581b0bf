"""Conformer (arXiv 2005.08100): attention for long range and a convolution for short range, between two half-step feed-forwards."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn.mixers.attention.scores import pieces
from linattn.mixers.base import Mixer
from linattn.mixers.context import CallContext
from linattn.mixers.parts import head_size, to_float32
from linattn.mixers.registry import register

_PIECE = 512  # queries per block of scores
_BATCH_NORM = "in training its batch norm takes the mean over the real tokens of all rows"


@register(
    "conformer",
    title="Conformer block",
    paper="Conformer: Convolution-augmented Transformer for Speech Recognition",
    arxiv="2005.08100",
    year=2020,
    seeds=("001",),
    equation=r"y = \mathrm{LN}\big(c + \tfrac{1}{2} F_2(c)\big),\quad c = a + \mathrm{Conv}(a),\quad a = f + \mathrm{MHSA}(f),"
    r"\quad f = x + \tfrac{1}{2} F_1(x)",
    causal=False,
    recurrent=False,
    linear_in_values=False,
    oracle="transformers, Wav2Vec2ConformerEncoderLayer with relative positions",
    exemptions=dict.fromkeys(("bidirectional.rows", "bidirectional.padding", "bidirectional.packed", "ddp", "fsdp2"), _BATCH_NORM),
    families=("convolutions",),
    chinese={
        "Conformer block": "Conformer 块",
        "Wav2Vec2ConformerEncoderLayer with relative positions": "带相对位置的 Wav2Vec2ConformerEncoderLayer",
        "in training its batch norm takes the mean over the real tokens of all rows": "训练时它的批归一化对所有行的真实 token 求均值",
    },
)
class Conformer(Mixer):
    """Whole block with residuals and norms; each F has a norm before it and SiLU inside. Names as in transformers.

    Attention has relative positions, by sinusoids as in Transformer-XL. The convolution module is a gated map, a depthwise convolution,
    a batch norm, SiLU and a map. In training the statistics are those of the real tokens; neither module reads padding.

    Args:
        dim: width D of the model.
        heads: H; dim must be a multiple.
        hidden: inner width of the feed-forwards; 4 D by default.
        kernel_size: size of the convolution in tokens, odd; the paper has 32, its public implementations 31.
    """

    packs = False

    def __init__(self, dim: int, heads: int = 4, *, hidden: int | None = None, kernel_size: int = 31) -> None:
        super().__init__(dim)
        if dim % 2:
            raise ValueError(f"dim must be even, for sines and cosines, but came as {dim}")
        hidden = 4 * dim if hidden is None else hidden
        if hidden < 1:
            raise ValueError(f"hidden must be at least 1 channel, but came as {hidden}")
        self.ffn1_layer_norm, self.ffn1 = nn.LayerNorm(dim), HalfStepFeedForward(dim, hidden)
        self.self_attn_layer_norm, self.self_attn = nn.LayerNorm(dim), RelativeAttention(dim, heads)
        self.conv_module = Convolution(dim, kernel_size)
        self.ffn2_layer_norm, self.ffn2 = nn.LayerNorm(dim), HalfStepFeedForward(dim, hidden)
        self.final_layer_norm = nn.LayerNorm(dim)

    def mix(self, x: Tensor, call: CallContext) -> Tensor:
        valid = call.valid
        x = x + self.ffn1(self.ffn1_layer_norm(x)) / 2
        x = x + self.self_attn(self.self_attn_layer_norm(x), valid)
        x = x + self.conv_module(x, valid)
        return self.final_layer_norm(x + self.ffn2(self.ffn2_layer_norm(x)) / 2)


class HalfStepFeedForward(nn.Module):
    """Feed-forward silu(x W₁ + b₁) W₂ + b₂."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.intermediate_dense, self.output_dense = nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.output_dense(F.silu(self.intermediate_dense(x)))


class RelativeAttention(nn.Module):
    """Attention softmax(((q_t + u) k_iᵀ + (q_t + w) (W R_{t-i})ᵀ) / √d) v_i over all tokens, R the sinusoids of signed distances."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads, self.size = heads, head_size("dim", dim, heads)
        self.linear_q, self.linear_k, self.linear_v, self.linear_out = (nn.Linear(dim, dim) for _ in range(4))
        self.linear_pos = nn.Linear(dim, dim, bias=False)
        self.pos_bias_u, self.pos_bias_v = (nn.Parameter(torch.zeros(heads, self.size)) for _ in range(2))

    def forward(self, x: Tensor, valid: Tensor | None) -> Tensor:
        """Attend within x [B, T, D], of which ``valid`` [B, T] are real (None: all)."""
        tokens = x.shape[1]
        q, k, v = (p(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in (self.linear_q, self.linear_k, self.linear_v))
        q, k, v, distances = (
            to_float32(q),
            to_float32(k),
            to_float32(v),
            to_float32(self.distances(tokens, x)),
        )  # [B, H, T, K] and [H, 2 T - 1, K]
        content, position = (q + to_float32(b)[:, None] for b in (self.pos_bias_u, self.pos_bias_v))
        unseen = None if valid is None else (~valid & valid.any(1, keepdim=True))[:, None, None]  # [B, 1, 1, T]
        out = []
        for start, stop in pieces(tokens, _PIECE):
            near = position[:, :, start:stop] @ distances[:, tokens - stop : 2 * tokens - 1 - start].mT  # [B, H, t, T + t - 1]
            query, key = torch.arange(stop - start, device=x.device)[:, None], torch.arange(tokens, device=x.device)
            column = (stop - start - 1 - query + key).expand(*near.shape[:2], -1, -1)  # index of the distance between query and key
            scores = (content[:, :, start:stop] @ k.mT + near.gather(3, column)) * self.size**-0.5
            scores = scores if unseen is None else scores.masked_fill(unseen, -torch.inf)
            out.append(scores.softmax(-1) @ v)
        return self.linear_out(torch.cat(out, 2).transpose(1, 2).flatten(2).to(x.dtype))

    def distances(self, tokens: int, like: Tensor) -> Tensor:
        """Mapped sinusoids of the distances from ``tokens`` - 1 down to 1 - ``tokens``, [H, 2 tokens - 1, K]; empty without tokens."""
        dim, dtype = self.linear_pos.in_features, to_float32(like).dtype
        rate = 10000.0 ** (-torch.arange(0, dim, 2, dtype=dtype, device=like.device) / dim)
        angles = torch.arange(tokens - 1, -max(tokens, 1), -1, dtype=dtype, device=like.device)[:, None] * rate
        table = torch.stack([angles.sin(), angles.cos()], -1).flatten(1)  # alternating sine and cosine
        return self.linear_pos(table.to(self.linear_pos.weight.dtype)).unflatten(-1, (self.heads, -1)).transpose(0, 1)


class Convolution(nn.Module):
    """Gated map x W₁, a non-causal depthwise convolution, a batch norm, SiLU, W₂."""

    def __init__(self, dim: int, kernel_size: int) -> None:
        super().__init__()
        if kernel_size < 1 or kernel_size % 2 == 0:
            raise ValueError(f"kernel_size must be an odd number of at least 1, but came as {kernel_size}")
        self.layer_norm = nn.LayerNorm(dim)
        self.pointwise_conv1, self.pointwise_conv2 = nn.Conv1d(dim, 2 * dim, 1, bias=False), nn.Conv1d(dim, dim, 1, bias=False)
        self.depthwise_conv = nn.Conv1d(dim, dim, kernel_size, padding=kernel_size // 2, groups=dim, bias=False)
        self.batch_norm = RealBatchNorm(dim)

    def forward(self, x: Tensor, valid: Tensor | None) -> Tensor:
        if not x.shape[1]:
            return x  # torch's convolution rejects an empty one
        gated = F.glu(self.pointwise_conv1(self.layer_norm(x).mT), 1)  # [B, D, T]
        gated = gated if valid is None else torch.where(valid[:, None], gated, 0.0)
        normed = self.batch_norm(self.depthwise_conv(gated).mT, valid)
        return self.pointwise_conv2(F.silu(normed).mT).mT


class RealBatchNorm(nn.BatchNorm1d):
    """Batch norm of tokens [B, T, D] with statistics of the real tokens, at least one."""

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    def forward(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        mean, variance = (to_float32(t) for t in (self.running_mean, self.running_var))
        tokens = to_float32(x)
        if self.training:
            real = tokens.new_ones(x.shape[:2]) if valid is None else valid.to(tokens.dtype)
            count = real.sum().clamp(min=1)
            mean = (tokens * real[..., None]).sum((0, 1)) / count
            variance = ((tokens - mean).square() * real[..., None]).sum((0, 1)) / count
            self._remember(mean.detach(), variance.detach() * count / (count - 1).clamp(min=1))
        return ((tokens - mean) * (variance + self.eps).rsqrt() * to_float32(self.weight) + to_float32(self.bias)).to(x.dtype)

    @torch.no_grad()
    def _remember(self, mean: Tensor, variance: Tensor) -> None:
        self.num_batches_tracked += 1
        for kept, new in ((self.running_mean, mean), (self.running_var, variance)):
            kept.lerp_(new.to(kept.dtype), self.momentum or 0.1)
