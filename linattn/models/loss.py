"""Loss of the next token from hidden states, computed in chunks of tokens, so that the logits of all tokens never exist at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from linattn.models.language import Head

IGNORED = -100  # label of a token without a loss, as in torch
CHUNK_BYTES = 1 << 28  # float32 logits of a chunk by default
Pointwise = Callable[[Tensor, Tensor, float, float, torch.dtype], tuple[Tensor, Tensor]]  # logits of a chunk -> loss and gradient


@dataclass(frozen=True)
class TokenLoss:
    """Cross entropy of the next token, with the z-loss of PaLM (arXiv 2204.02311, section 5) in training.

    Args:
        chunk: tokens whose logits are computed at a time.
        z: factor of the squared logarithm of the softmax's denominator; 0: no z-loss.
        aligned: labels are already those of each position's next token, as where processes share a sequence.
        compile: fuse what happens to the logits of a chunk by ``torch.compile``.
    """

    chunk: int
    z: float = 0.0
    aligned: bool = False
    compile: bool = False

    def __call__(self, hidden: Tensor, head: Head, labels: Tensor, items: Tensor | int | None = None) -> Tensor:
        """Compute the loss of ``hidden`` [B, T, D] for ``labels`` [B, T], the unshifted tokens; a scalar in at least float32.

        Args:
            hidden: outputs of the backbone.
            head: the output layer; the z-loss is added if it is in training mode.
            labels: tokens, -100 for those without a loss; each position is compared with the next one's, unless ``aligned``.
            items: the sum is divided by this instead of the number of labels.
        """
        next_tokens = (labels if self.aligned else F.pad(labels, (0, 1), value=IGNORED)[:, 1:]).flatten()
        count = (next_tokens != IGNORED).sum() if items is None else items
        z = self.z if head.training else 0.0
        cap = 0.0 if head.soft_cap is None else head.soft_cap
        return _summed(self.compile, hidden.flatten(0, 1), head.weight, next_tokens, self.chunk, z, cap) / count


def chunk_of(tokens: int, vocab_size: int) -> int:
    """Tokens whose logits take at most :data:`CHUNK_BYTES`, a power of two; all ``tokens`` where they fit."""
    most = max(1, CHUNK_BYTES // (4 * vocab_size))
    return tokens if tokens <= most else 1 << (most.bit_length() - 1)


@torch.compiler.disable  # under torch.compile on a GPU (torch 2.11) every gradient of a training was zero
def _summed(fuse: bool, *inputs: Any) -> Tensor:
    total, *_ = _ChunkedLoss.apply(*inputs, _compiled() if fuse else _loss_and_gradient)
    return total


class _ChunkedLoss(torch.autograd.Function):
    """Sum of the losses of hidden [N, D] with weight [V, D] and targets [N]; the gradients are computed with the loss, chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int, z: float, cap: float, pointwise: Pointwise
    ) -> tuple[Tensor, ...]:
        device = hidden.device.type
        with torch.autocast(device, enabled=False):
            low = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
            compute_dtype = torch.promote_types(hidden.dtype, torch.float32)
            matrix, total = weight.to(low), torch.zeros((), dtype=compute_dtype, device=hidden.device)
            learns = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
            d_hidden, d_weight = (torch.zeros_like(t, dtype=compute_dtype) if learns else t.new_empty(0) for t in (hidden, weight))
            for start in range(0, len(hidden), chunk):
                rows = slice(start, start + chunk)
                x = hidden[rows].to(low)
                loss, d_logits = pointwise(x @ matrix.T, targets[rows], z, cap, compute_dtype)
                total += loss
                if learns:
                    d_hidden[rows] = d_logits @ matrix
                    d_weight += d_logits.T @ x
        ctx.save_for_backward(d_hidden, d_weight)
        ctx.dtypes = hidden.dtype, weight.dtype
        return (total,)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        d_hidden, d_weight = ctx.saved_tensors
        return *((gradient * d).to(t) for d, t in zip((d_hidden, d_weight), ctx.dtypes, strict=True)), None, None, None, None, None


def _loss_and_gradient(scores: Tensor, targets: Tensor, z: float, cap: float, compute_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Summed loss of ``scores`` [C, V] before the soft cap, in ``compute_dtype``, and its gradient [C, V] in the dtype of ``scores``."""
    low, scores = scores.dtype, scores.to(compute_dtype)
    logits = cap * torch.tanh(scores / cap) if cap else scores
    real = targets != IGNORED
    places = targets.where(real, 0)[:, None]
    denominator = logits.logsumexp(-1, keepdim=True)  # log Z, [C, 1]
    losses = denominator - logits.gather(1, places) + z * denominator**2
    gradient = (logits - denominator).exp() * (1 + 2 * z * denominator)
    if torch.compiler.is_compiling():  # fused with its neighbours, unlike a scatter
        gradient = gradient - (torch.arange(logits.shape[1], device=logits.device) == places).to(compute_dtype)
    else:
        gradient.scatter_add_(1, places, -torch.ones_like(denominator))
    gradient = (gradient * (1 - (logits / cap) ** 2) if cap else gradient) * real[:, None]
    return (losses * real[:, None]).sum(), gradient.to(low)


@cache
def _compiled() -> Pointwise:
    return torch.compile(_loss_and_gradient, dynamic=False)
