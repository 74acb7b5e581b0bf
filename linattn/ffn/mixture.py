"""Base of mixtures of experts: choice of experts, capacity, losses, and reports on a pass."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn.ffn.collect import listening, report
from linattn.ffn.dispatch import ragged, slots, slotted
from linattn.ffn.share import Share
from linattn.mixers import FeedForward
from linattn.mixers.parts import to_float32
from linattn.ops.checks import no_autocast

CAPACITY = "an expert has a capacity for each row of tokens, and a list of tokens is one row"


class Mixture(FeedForward):
    """Base of feed-forwards that run each token through a few of ``count`` experts.

    The experts' weights are parameters [count, ...], named in ``stacked``; :meth:`expert` computes with them.
    """

    stacked: ClassVar[tuple[str, ...]] = ("gate_proj", "up_proj", "down_proj")
    share: Share | None = None  # this process's part of the experts, if they are spread over several

    def __init__(self, dim: int, count: int) -> None:
        super().__init__(dim)
        if count < 1:
            raise ValueError(f"count must be at least 1 expert, but came as {count}")
        self.count = count
        self.router = nn.Linear(dim, count, bias=False)

    def stack(self, *shape: int) -> nn.Parameter:
        """The weights [count, out, in] of a linear layer in every expert."""
        if min(shape) < 1:
            raise ValueError(f"hidden must be at least 1 channel, but came as {min(shape)}")
        bound = shape[-1] ** -0.5
        return nn.Parameter(torch.empty(self.count, *shape).uniform_(-bound, bound))

    def expert(self, x: Tensor, *weights: Tensor) -> Tensor:
        """Experts on x [.., n, D], their weights [.., out, in] in the order of ``stacked``: one of them, or a batch."""
        gate, up, down = weights
        return (F.silu(x @ gate.mT) * (x @ up.mT)) @ down.mT

    def all_at_once(self, rows: Tensor) -> Tensor:
        """Each expert on rows of its own, [count, n, D] -> [count, n, D]."""
        weights = [getattr(self, name) for name in self.stacked]
        if self.share is None:
            return self.expert(rows, *weights)
        return self.share.elsewhere(rows, lambda mine: self.expert(mine, *weights))

    def one(self, e: int, x: Tensor) -> Tensor:
        """Expert number ``e`` on tokens [n, D]."""
        return self.expert(x, *(getattr(self, name)[e] for name in self.stacked))

    def dispatched(self, x: Tensor, chosen: Tensor, wanted: Tensor, capacity: int | None) -> tuple[Tensor, Tensor]:
        """Outputs [G, S, k, D] of the experts ``chosen`` [G, S, k] for x [G, S, D], and a mask of the choices within the capacity.

        An expert takes at most ``capacity`` tokens of a group; None: all.
        """
        if capacity is None and self.share is None:
            return ragged(x, chosen, self.count, self.one), wanted
        if capacity is None:
            capacity = int(F.one_hot(chosen.flatten(1), self.count).sum(1).max()) if chosen.numel() else 0
        slot = slots(chosen, wanted, self.count, capacity)
        return slotted(x, slot, self.count, capacity, self.all_at_once), slot < self.count * x.shape[0] * capacity

    def flops(self, x: Tensor, past: int = 0) -> int:
        """Operations of every token at all of its experts, including refused ones."""
        tokens, stacked = math.prod(x.shape[:-1]), [getattr(self, name) for name in self.stacked]
        own = {id(p) for p in stacked}
        rest = sum(p.numel() for p in self.parameters() if p.ndim == 2 and id(p) not in own)
        return 2 * tokens * (self.active * sum(p[0].numel() for p in stacked) + rest)

    active: int  # experts of a token


class Routed(Mixture):
    """Base of the mixtures with a capacity: Switch, GShard, ST-MoE.

    A group is a row of tokens: x [.., S, D]. An expert takes at most ⌈capacity · S / count⌉ tokens of a group, the first ones; the
    output of a token without expert is 0, so that only the residual around the feed-forward remains. The router computes in float32 at
    least, also under autocast. Padding is treated as tokens and counts towards the capacity.

    Within :func:`linattn.ffn.reports` a pass reports the losses ``balance`` and ``z``, weighted, where their weights are not 0, and the
    counts ``tokens``, ``dropped`` (tokens without any expert) and ``refused`` (choices beyond the capacity).
    """

    adds_loss = True

    def __init__(
        self, dim: int, *, count: int, active: int, capacity: float | None, eval_capacity: float | None, balance: float, z: float,
        jitter: float = 0.0, threshold: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__(dim, count)
        for name, value in (("capacity", capacity), ("eval_capacity", eval_capacity)):
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} must be a number above 0, or None for no limit, but came as {value!r}")
        for name, value in (("balance", balance), ("z", z), ("jitter", jitter), ("threshold", threshold)):
            if not 0 <= value < math.inf:
                raise ValueError(f"{name} must be at least 0, but came as {value!r}")
        if not 1 <= active <= count:
            raise ValueError(f"count must be at least the {active} experts of a token, but came as {count}")
        self.active, self.capacity, self.eval_capacity = active, capacity, eval_capacity
        self.balance, self.z, self.jitter, self.threshold = balance, z, jitter, threshold

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        self.check_width("x", x)
        groups = x.reshape(math.prod(x.shape[:-2]), x.shape[-2] if x.ndim > 1 else 1, x.shape[-1])  # [G, S, D]
        logits = self.logits(groups)
        scores = logits.softmax(-1)
        gates, chosen = scores.topk(self.active, -1)  # [G, S, k]
        gates = self.weights(gates)
        wanted = self.wanted(gates)
        back, kept = self.dispatched(groups, chosen, wanted, self.expert_capacity(groups.shape[1]))
        if torch.is_grad_enabled() or listening():  # also in a recomputation by checkpointing, whose report is discarded
            report(self.losses(logits, scores, chosen), _counts(wanted, kept))
        return (back * (gates * kept).to(back.dtype)[..., None]).sum(2).to(x.dtype).view_as(x)

    def logits(self, x: Tensor) -> Tensor:
        """Logits of the router [G, S, count] in float32, float64 for float64; in training of tokens with ``jitter``."""
        with no_autocast(x):
            x = to_float32(x)
            if self.training and self.jitter:
                x = x * torch.empty_like(x).uniform_(1 - self.jitter, 1 + self.jitter)
            return F.linear(x, to_float32(self.router.weight))

    def weights(self, gates: Tensor) -> Tensor:
        """Weights of the experts' outputs, from the scores [G, S, k] of the chosen experts."""
        return gates / gates.sum(-1, keepdim=True).clamp(min=1e-9)

    def wanted(self, gates: Tensor) -> Tensor:
        """Mask [G, S, k] of the choices to use: all, but in training later ones may be dropped at random."""
        if not (self.training and self.threshold):
            return torch.ones_like(gates, dtype=torch.bool)
        by_chance = torch.rand_like(gates) < gates / self.threshold
        return by_chance | (torch.arange(self.active, device=gates.device) == 0)

    def expert_capacity(self, tokens: int) -> int | None:
        """Number of ``tokens`` tokens of a row that an expert takes; None: all."""
        capacity = self.capacity if self.training else self.eval_capacity
        return None if capacity is None else min(tokens, math.ceil(capacity * tokens / self.count - 1e-9))

    def losses(self, logits: Tensor, scores: Tensor, chosen: Tensor) -> dict[str, Tensor]:
        """Weighted means over the groups: count Σ_e f_e P_e, f the shares of first choices and P the mean scores, and log² Σ exp."""
        found, many = {}, max(scores.shape[0] * scores.shape[1], 1)
        if self.balance:
            first = F.one_hot(chosen[..., 0], self.count).to(scores.dtype)
            product = (first.sum(1) * scores.sum(1)).sum() / max(scores.shape[1], 1)  # Σ_g S Σ_e f P
            found["balance"] = self.balance * self.count * product / many
        if self.z:
            found["z"] = self.z * logits.logsumexp(-1).square().sum() / many
        return found

    def extra_repr(self) -> str:
        return f"count={self.count}, active={self.active}, capacity={self.capacity}, eval_capacity={self.eval_capacity}"


class ReluExperts(Routed):
    """Experts that are feed-forwards with ReLU and without biases, of ``hidden`` channels, 4 of D by default: Switch and GShard."""

    stacked: ClassVar[tuple[str, ...]] = ("up_proj", "down_proj")

    def __init__(self, dim: int, hidden: int | None = None, **options: Any) -> None:
        super().__init__(dim, **options)
        hidden = 4 * dim if hidden is None else hidden
        self.up_proj, self.down_proj = self.stack(hidden, dim), self.stack(dim, hidden)

    def expert(self, x: Tensor, *weights: Tensor) -> Tensor:
        up, down = weights
        return F.relu(x @ up.mT) @ down.mT


def _counts(wanted: Tensor, kept: Tensor) -> dict[str, Any]:
    served = kept.any(-1)
    return {"tokens": served.numel(), "dropped": (~served).sum(), "refused": (wanted & ~kept).sum()}
