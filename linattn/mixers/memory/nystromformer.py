"""Nyströmformer (arXiv 2102.03902): means of segments as landmarks between queries and keys."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn.mixers.base import Recurrence
from linattn.mixers.context import CallContext
from linattn.mixers.memory.attention import BesideSoftmax, check_least
from linattn.mixers.parts import to_float32
from linattn.mixers.pattern.learned import by_head, pick
from linattn.mixers.registry import register


@register(
    "nystromformer",
    title="Nyströmformer",
    paper="Nyströmformer: A Nyström-Based Algorithm for Approximating Self-Attention",
    arxiv="2102.03902",
    year=2021,
    seeds=("001",),
    causal=False,
    equation=r"O = F A^{+} B\, V + \mathrm{DWC}(V),\quad F = \mathrm{softmax}(Q \tilde K^\top),\quad"
    r" A = \mathrm{softmax}(\tilde Q \tilde K^\top),\quad B = \mathrm{softmax}(\tilde Q K^\top),\quad"
    r" Z_{j+1} = \tfrac14 Z_j (13 I - A Z_j (15 I - A Z_j (7 I - A Z_j)))",
    oracle="transformers, NystromformerSelfAttention",
    families=("low rank", "down-sampling"),
)
class Nystromformer(BesideSoftmax):
    """``landmarks`` = m segments of a sequence, equally long or, where m does not divide n, up to one token; their means of queries and
    of keys are Q̃ and K̃, all scaled by d^(-1/4). A sequence of fewer tokens has one landmark for each.

    The pseudo-inverse is that of ``iterations`` = 6 of the paper's, from Aᵀ / (‖A‖₁ ‖A‖∞) of each row and head: transformers
    takes the largest norm of the batch, so that rows depend on each other. Six do not converge for every matrix.
    ``kernel_size`` is of the convolution along the values that is added, one kernel for each head; 0 for none.
    """

    def __init__(
        self, dim: int, heads: int = 4, *, landmarks: int = 64, iterations: int = 6, kernel_size: int = 33, bias: bool = True
    ) -> None:  # fmt: skip
        super().__init__(dim, heads, bias=bias, out_bias=bias)
        check_least(1, landmarks=landmarks, iterations=iterations)
        if kernel_size < 0 or (kernel_size and kernel_size % 2 == 0):
            raise ValueError(f"kernel_size must be odd, or 0 for no convolution, but came as {kernel_size}")
        self.landmarks, self.iterations = landmarks, iterations
        self.conv = None
        if kernel_size:
            self.conv = nn.Conv2d(heads, heads, (kernel_size, 1), padding=(kernel_size // 2, 0), groups=heads, bias=False)

    def attend(self, r: Recurrence, call: CallContext) -> Tensor:
        if not call.tokens:
            return r.v
        q, k, v = (by_head(t) for t in (r.q, r.k, r.v))
        places = self._segments(call)
        there = (places >= 0).any(-1)  # [B, 1, M]
        q_means, k_means = (_means(t, places) for t in (q, k))  # [B, H, M, K]
        q, k, v = (to_float32(t) for t in (q, k, v))
        spread = self._softmax(q, k_means, there)
        between = self._softmax(q_means, k_means, there) * there[..., None]
        real = None if call.valid is None else call.valid[:, None]
        gathered = self._softmax(q_means, k, real) * there[..., None]
        o = spread @ (inverse(between, self.iterations) @ (gathered @ v))
        if self.conv is not None:
            o = o + F.conv2d(v, self.conv.weight.to(v.dtype), padding=self.conv.padding, groups=self.heads)
        return by_head(o.to(r.v.dtype))

    def _segments(self, call: CallContext) -> Tensor:
        """Tokens of each segment, [B, 1, M, L], -1 for none: token t of n is in segment ⌊t m / n⌋."""
        tokens, device = call.tokens, call.counts.device
        count = call.counts[:, None, None]  # [B, 1, 1]
        segments = count.clamp(max=self.landmarks)
        border = torch.arange(min(self.landmarks, tokens) + 1, device=device)
        border = torch.where(border <= segments, -(-border * count // segments.clamp(min=1)), count)  # [B, 1, M + 1]
        places = border[..., :-1, None] + torch.arange(-(-tokens // min(self.landmarks, tokens)), device=device)
        return torch.where(places < border[..., 1:, None], places, -1)

    def _softmax(self, q: Tensor, k: Tensor, seen: Tensor | None) -> Tensor:
        """Softmax weights [B, H, T, S] of keys that are ``seen`` [B, 1, S], of all if none is."""
        scores = q @ k.mT * self.size**-0.5
        if seen is not None:
            scores = scores.masked_fill(~(seen | ~seen.any(-1, keepdim=True))[..., None, :], -torch.inf)
        return scores.softmax(-1)


def _means(t: Tensor, places: Tensor) -> Tensor:
    """Means of t [B, H, T, K] over the tokens at ``places`` [B, 1, M, L], in float32: [B, H, M, K]."""
    real = places >= 0
    found = to_float32(pick(t, places.expand(-1, t.shape[1], -1, -1))) * real[..., None]
    return found.sum(-2) / real.sum(-1, keepdim=True).clamp(min=1)


def inverse(a: Tensor, iterations: int) -> Tensor:
    """Pseudo-inverse of a [..., M, M] >= 0 by ``iterations`` of third order; rows and columns of zeros stay zero."""
    norm = a.sum(-2).amax(-1) * a.sum(-1).amax(-1)
    z = a.mT / torch.where(norm > 0, norm, 1.0)[..., None, None]
    one = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    for _ in range(iterations):
        az = a @ z
        z = 0.25 * z @ (13 * one - az @ (15 * one - az @ (7 * one - az)))
    return z
