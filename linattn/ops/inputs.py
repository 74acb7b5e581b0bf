"""One call of the recurrence as data: checked once at the public door, read by every backend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Inputs:
    """The arguments of :func:`linattn.linear_attention` after the checks, in the caller's dtypes.

    Shapes: ``q``, ``k`` [B, T, Hk, K] (``q`` may have its own T where ``causal`` is false), ``v`` [B, T, H, V].
    ``denominator`` says that ``q_t z_t`` is wanted beside the output; dividing by it is the door's work.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    decay: Tensor | None = None  # [H], [H, K], [B, T, H] or [B, T, H, K]
    beta: Tensor | None = None  # [B, T, H]
    erase: tuple[Tensor, Tensor] | None = None  # (read, write), each [B, T, H, K]
    bonus: Tensor | None = None  # [H, K]
    denominator: bool = False
    causal: bool = True
    initial: Tensor | None = None  # [N, H, K, V]
    initial_z: Tensor | None = None  # [N, H, K]
    return_state: bool = False
    cu_seqlens: Tensor | None = None  # [N + 1]

    @property
    def heads(self) -> int:
        return self.v.shape[2]

    @property
    def rows(self) -> int:
        """Number of states: sequences where they are packed, else rows of the batch."""
        return self.q.shape[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1

    @property
    def compute_dtype(self) -> torch.dtype:
        """States and sums are float64 for float64 and float32 for everything else."""
        return torch.float64 if self.v.dtype == torch.float64 else torch.float32

    @property
    def decay_per_channel(self) -> bool:
        return self.decay is not None and self.decay.ndim in (2, 4)

    @property
    def decay_constant(self) -> bool:
        return self.decay is not None and self.decay.ndim <= 2

    @property
    def flat(self) -> tuple[Any, ...]:
        """The arguments of kernels that take the whole call, in the order of their operators."""
        x, (read, write) = self, self.erase or (None, None)
        return (x.q, x.k, x.v, x.decay, x.beta, read, write, x.bonus, x.initial, x.initial_z, x.cu_seqlens, x.scale, x.denominator)

    @property
    def differentiable(self) -> tuple[Tensor, ...]:
        """Every tensor that a gradient can reach."""
        given = (self.q, self.k, self.v, self.decay, self.beta, *(self.erase or ()), self.bonus, self.initial, self.initial_z)
        return tuple(t for t in given if t is not None)


@dataclass(frozen=True)
class Outputs:
    """Results of a backend: ``o`` [B, T, H, V] undivided; ``denominator`` [B, T, H]; the final states."""

    o: Tensor
    denominator: Tensor | None = None
    state: Tensor | None = None  # [N, H, K, V]
    z: Tensor | None = None  # [N, H, K]
