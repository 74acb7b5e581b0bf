"""The loss of a language model whose sequence several processes share."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from linattn.mixers.parts import to_float32
from linattn.ops import checks
from linattn.parallel.layout import Layout

NOTHING = -100  # target of a token without a loss


def next_tokens(ids: Tensor, layout: Layout) -> Tensor:
    """The token after each of this process's, [B, T] int64, -100 at the end of a sequence.

    ``ids`` [B, tokens] are the whole sequence: the token after the last of a part is another process's.
    """
    checks.shape("ids", checks.tensor("ids", ids), "[B, tokens]", (ids.shape[0], layout.tokens))
    targets = F.pad(ids[:, 1:].long(), (0, 1), value=NOTHING)[:, : layout.tokens]
    ends = [stop - 1 for start, stop in zip(layout.borders[:-1], layout.borders[1:], strict=True) if stop > start]
    targets[:, torch.tensor(ends, dtype=torch.int64, device=ids.device)] = NOTHING
    return layout.shard(targets, 1)


def token_loss(logits: Tensor, targets: Tensor, layout: Layout) -> Tensor:
    """Cross-entropy whose mean over the layout's processes is the mean over all tokens of the whole sequences.

    Data parallel training averages gradients over processes, so the gradients are those of one process. For a figure to show average
    the losses of all.

    Args:
        logits: [B, T, vocab] of this process's tokens.
        targets: [B, T] as :func:`next_tokens` gives them.
        layout: who holds what.
    """
    checks.shape("targets", checks.tensor("targets", targets, logits), "[B, T] of logits", tuple(logits.shape[:2]))
    count = (targets != NOTHING).sum()
    dist.all_reduce(count, group=layout.group)
    total = F.cross_entropy(to_float32(logits.flatten(0, 1)), targets.flatten(), ignore_index=NOTHING, reduction="sum")
    return total * layout.ranks / count.clamp(min=1)
