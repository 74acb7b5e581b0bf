"""Decay inside a chunk: none, per head, or per channel.

Each class weights rows by products of α between two positions of a chunk. An exponent is always a sum of the logarithms between
these positions, so it is <= 0, a reset (-inf) gives an exact 0, and tokens before a reset do not affect later ones.
``exclusive`` omits the decay of the reading token, which then reads the state before its own decay (bonus, erase).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from linattn.ops import tracing


class Factor(NamedTuple):
    """exp(log) as ``keep + rest`` with keep 1 or 0, because a factor near 1 would be rounded in the same direction at every step."""

    keep: Tensor
    rest: Tensor

    @classmethod
    def of(cls, log: Tensor) -> Factor:
        near = log.abs() < 0.5  # also for complex logarithms
        return cls(near.to(log.dtype), torch.where(near, torch.where(near, log, 0.0).expm1(), log.exp()))

    def apply(self, state: Tensor, written: Tensor) -> Tensor:
        """Compute ``exp(log) * state + written``."""
        return torch.addcmul(torch.addcmul(written, self.rest, state), self.keep, state)


class NoDecay:
    """Absence of decay, α = 1; base of the other classes."""

    total: Tensor | None = None  # logarithm of the decay over the chunk

    def from_start(self, x: Tensor, exclusive: bool = False) -> Tensor:
        """Weight the rows of ``x`` [..., C, X] by the decay from the start of the chunk to each row."""
        return x

    def to_end(self, x: Tensor) -> Tensor:
        """Weight the rows of ``x`` [..., C, X] by the decay from each row to the end of the chunk."""
        return x

    def products(self, left: Tensor, right: Tensor, exclusive: bool = False) -> Tensor:
        """Products [..., C, C] of row i of ``left`` with row j of ``right`` for j <= i (j < i if exclusive), decayed from j to i."""
        return (left @ right.mT).tril(-1 if exclusive else 0)


class HeadDecay(NoDecay):
    """Decay per head: a logarithm for each token and head, [..., C]."""

    def __init__(self, log: Tensor) -> None:
        log = log[..., None]
        sums = log.cumsum(-2)
        self.weights = (_Weights.forward if tracing.forward_mode() else _Weights.apply)(log[..., 0])  # [..., C, C]
        self.suffix = _exp(_suffix(log))  # [..., C, 1]
        self.prefix = _exp(sums)  # [..., C, 1]
        self.total = sums[..., -1:, :]  # [..., 1, 1]

    def from_start(self, x: Tensor, exclusive: bool = False) -> Tensor:
        return x * (_delayed(self.prefix) if exclusive else self.prefix)

    def to_end(self, x: Tensor) -> Tensor:
        return x * self.suffix

    def products(self, left: Tensor, right: Tensor, exclusive: bool = False) -> Tensor:
        weights = self.weights
        if exclusive:
            weights = torch.cat([torch.zeros_like(weights[..., :1, :]), weights[..., :-1, :]], -2)
        return (left @ right.mT) * weights


class ChannelDecay(NoDecay):
    """Decay per channel: a logarithm for each token, head and channel, [..., C, K], C a power of two.

    The pairs of a block of 2h tokens are those inside its two halves, and those of a row in the second half with a row in the
    first. The latter factor at the boundary between the halves into a matrix product in which both exponents are sums up to the
    boundary, so they are <= 0. The halves are divided recursively down to single tokens.
    """

    def __init__(self, log: Tensor) -> None:
        self.log = log
        sums = log.cumsum(-2)
        self.borders = _borders(log)
        self.prefix = _exp(sums)
        self.total = sums[..., -1, :, None]  # [..., K, 1]

    def from_start(self, x: Tensor, exclusive: bool = False) -> Tensor:
        return x * (_delayed(self.prefix) if exclusive else self.prefix)

    def to_end(self, x: Tensor) -> Tensor:
        return x * _exp(_suffix(self.log))

    def products(self, left: Tensor, right: Tensor, exclusive: bool = False) -> Tensor:
        own = left.new_zeros(left.shape[:-1]) if exclusive else (left * right).sum(-1)  # products of a token with itself, without decay
        done = own[..., None, None]  # [..., C, 1, 1] blocks
        for level, (second, first) in enumerate(self.borders):
            h = 2**level
            earlier, later = halves(right, h)[0], halves(left, h)[1]
            if h > 1:
                across = (later * (_delayed(second) if exclusive else second)) @ (earlier * first).mT  # [..., C / 2h, h, h]
            else:  # no decay between neighbours
                across = (later * earlier if exclusive else later * second * earlier).sum(-1, keepdim=True)
            upper, lower = done.unflatten(-3, (-1, 2)).unbind(-3)
            done = torch.cat([F.pad(upper, (0, h)), torch.cat([across, lower], -1)], -2)
        return done[..., 0, :, :]


def least(dtype: torch.dtype) -> float:
    """Logarithm of the smallest non-zero factor, ``tiny`` e^10; smaller ones are set to 0.

    Their products would be subnormal numbers, which have few exact digits and are a hundred times slower on a CPU.
    """
    return math.log(torch.finfo(dtype).tiny) + 10


def _exp(log: Tensor) -> Tensor:
    return F.threshold(log, least(log.dtype), -math.inf).exp()


class _Weights(torch.autograd.Function):
    """Weights [..., C, C] from logarithms [..., C]: exp of separate sums over j + 1 ... i; 0 above the diagonal.

    The gradient of a logarithm is the sum over the pairs around it, not a difference of longer sums.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(log: Tensor) -> Tensor:
        below = log.new_ones(log.shape[-1:] * 2, dtype=torch.bool).tril(-1)
        return _exp(torch.where(below, log[..., :, None], 0.0).cumsum(-2)).tril()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (weights,) = ctx.saved_tensors
        later = weights.new_ones(weights.shape[-2:]).triu()
        return (later @ (weights * gradient).tril(-1)).tril(-1).sum(-1)


def _borders(log: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Decay factors for h = 1, 2, 4, ...: from the middle to each row of second halves, and from each row of first halves to the middle."""
    levels, h = [], 1
    while 2 * h <= log.shape[-2]:
        first, second = halves(log, h)
        levels.append((_exp(second.cumsum(-2)), _exp(_suffix(first))))
        h *= 2
    return levels


def halves(x: Tensor, h: int) -> tuple[Tensor, Tensor]:
    """Split [..., C, K] into first and second halves [..., C / 2h, h, K] of the blocks of 2h rows."""
    first, second = x.unflatten(-2, (-1, 2, h)).unbind(-3)
    return first, second


def _suffix(log: Tensor) -> Tensor:
    """Sum over the rows after each row, from the end, so that a reset does not affect later rows."""
    sums = log[..., 1:, :].flip(-2).cumsum(-2).flip(-2)
    return torch.cat([sums, torch.zeros_like(log[..., :1, :])], -2)


def _delayed(factors: Tensor) -> Tensor:
    """Shift factors by one row: the first row reads the earlier state without decay."""
    return torch.cat([torch.ones_like(factors[..., :1, :]), factors[..., :-1, :]], -2)
