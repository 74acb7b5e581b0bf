"""Loss of a language model under context parallelism."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from linattn.mixers.parts import to_float32
from linattn.ops import checks
from linattn.parallel.layout import Layout

IGNORED = -100  # target of a token without a loss


def next_tokens(ids: Tensor, layout: Layout) -> Tensor:
    """Next token of each of this process's tokens, [B, T] int64, -100 at the end of a sequence.

    ``ids`` [B, tokens] are the whole sequence, because the next token may belong to another process.
    """
    checks.shape("ids", checks.tensor("ids", ids), "[B, tokens]", (ids.shape[0], layout.tokens))
    targets = F.pad(ids[:, 1:].long(), (0, 1), value=IGNORED)[:, : layout.tokens]
    ends = [stop - 1 for start, stop in zip(layout.borders[:-1], layout.borders[1:], strict=True) if stop > start]
    targets[:, torch.tensor(ends, dtype=torch.int64, device=ids.device)] = IGNORED
    return layout.shard(targets, 1)


def token_loss(logits: Tensor, targets: Tensor, layout: Layout) -> Tensor:
    """Compute the cross-entropy, scaled so that its mean over processes is the mean over all tokens of the whole sequences.

    Data parallel training averages gradients over processes, which gives the gradients of a single process. To report the loss,
    average it over the processes.

    Args:
        logits: [B, T, vocab] of this process's tokens.
        targets: [B, T] from :func:`next_tokens`.
        layout: the tokens of each process.
    """
    checks.shape("targets", checks.tensor("targets", targets, logits), "[B, T] of logits", tuple(logits.shape[:2]))
    count = (targets != IGNORED).sum()
    dist.all_reduce(count, group=layout.group)
    total = F.cross_entropy(to_float32(logits.flatten(0, 1)), targets.flatten(), ignore_index=IGNORED, reduction="sum")
    return total * layout.ranks / count.clamp(min=1)
