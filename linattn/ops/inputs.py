"""One call of the recurrence as data: checked once in the public function, read by every backend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Form = Literal["auto", "parallel", "chunk", "recurrent"]
Backend = Literal["auto", "triton", "cpu", "torch", "reference"]


class Plain(NamedTuple):
    """``S_t = Diag(α_t) S_{t-1} + k_tᵀ v_t``."""


class Delta(NamedTuple):
    """``S_t = D + β_t k_tᵀ (v_t − k_t D)`` with the decayed state ``D = Diag(α_t) S_{t-1}``."""

    beta: Tensor  # [B, T, H]


class Erase(NamedTuple):
    """``S_t = Diag(α_t) S_{t-1} + write_tᵀ (read_t S_{t-1}) + k_tᵀ v_t``."""

    read: Tensor  # [B, T, H, K]
    write: Tensor  # [B, T, H, K]


class Bonus(NamedTuple):
    """The plain rule, read before decay and write: ``o_t = q_t (S_{t-1} + Diag(u) k_tᵀ v_t)``."""

    u: Tensor  # [H, K]


Rule = Plain | Delta | Erase | Bonus
_PLAIN = Plain()
Operands = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]


def operands(rule: Rule) -> Operands:
    """The tensors (beta, read, write, bonus) of ``rule``, as operators take them; None for tensors that it does not have."""
    if isinstance(rule, Delta):
        return rule.beta, None, None, None
    if isinstance(rule, Erase):
        return None, rule.read, rule.write, None
    return None, None, None, rule.u if isinstance(rule, Bonus) else None


def rule_of(beta: Tensor | None, read: Tensor | None, write: Tensor | None, bonus: Tensor | None) -> Rule:
    """The rule that has these tensors, at most one rule's of them: the inverse of :func:`operands`."""
    if beta is not None:
        return Delta(beta)
    if read is not None and write is not None:
        return Erase(read, write)
    return Plain() if bonus is None else Bonus(bonus)


@dataclass(frozen=True)
class Terms:
    """The terms of the recurrence, with the shapes and meanings of :func:`linattn.linear_attention`'s arguments."""

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor | None = None
    beta: Tensor | None = None
    erase: tuple[Tensor, Tensor] | None = None
    bonus: Tensor | None = None
    normalize: bool | float | str = False
    scale: float | None = None


@dataclass(frozen=True)
class Given(Terms):
    """The arguments of :func:`linattn.linear_attention` as the caller passes them, before the checks."""

    causal: bool = True
    initial_state: Tensor | tuple[Tensor, Tensor] | None = None
    return_state: bool = False
    cu_seqlens: Tensor | None = None


class Flat(NamedTuple):
    """A call as the operators of torch take it: the rule spread out to its tensors, in the order of the schemas."""

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor | None
    beta: Tensor | None
    read: Tensor | None
    write: Tensor | None
    bonus: Tensor | None
    initial: Tensor | None
    initial_z: Tensor | None
    cu_seqlens: Tensor | None
    scale: float
    denominator: bool

    def inputs(self) -> Inputs:
        """The causal call that :attr:`Inputs.flat` spreads out, with its final state."""
        q, k, v, decay, beta, read, write, bonus, initial, initial_z, cu_seqlens, scale, denominator = self
        rule = rule_of(beta, read, write, bonus)
        return Inputs(q, k, v, scale, decay, rule, denominator, True, initial, initial_z, True, cu_seqlens)


@dataclass(frozen=True)
class Inputs:
    """The arguments of :func:`linattn.linear_attention` after the checks, in the caller's dtypes.

    Shapes: ``q``, ``k`` [B, T, Hk, K] (``q`` may have its own T where ``causal`` is false), ``v`` [B, T, H, V].
    ``denominator``: return ``q_t z_t`` beside the output; the public function divides by it.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    decay: Tensor | None = None  # [H], [H, K], [B, T, H] or [B, T, H, K]
    rule: Rule = _PLAIN
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
        """Number of states: packed sequences, or else rows of the batch."""
        return self.q.shape[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1

    @property
    def compute_dtype(self) -> torch.dtype:
        """Dtype of states and sums: float64 for float64, else float32."""
        return torch.float64 if self.v.dtype == torch.float64 else torch.float32

    @property
    def decay_per_channel(self) -> bool:
        return self.decay is not None and self.decay.ndim in (2, 4)

    @property
    def decay_constant(self) -> bool:
        return self.decay is not None and self.decay.ndim <= 2

    @property
    def flat(self) -> Flat:
        """The arguments of operators that take the whole call."""
        x = self
        return Flat(x.q, x.k, x.v, x.decay, *operands(x.rule), x.initial, x.initial_z, x.cu_seqlens, x.scale, x.denominator)

    def kernel_refusal(self, form: str) -> str | None:
        """Reason why no native kernel, of a CPU or a GPU, runs the call in ``form``, or None."""
        if form == "parallel":
            return "it has no quadratic form"
        if not self.causal:
            return "without causality the whole call is one matrix product"
        if self.v.shape[1] == 0 or self.rows == 0 or self.v.shape[0] == 0:
            return "there are no tokens"
        return None

    @property
    def differentiable(self) -> tuple[Tensor, ...]:
        """Tensors that may require gradients."""
        given = (self.q, self.k, self.v, self.decay, *self.rule, self.initial, self.initial_z)
        return tuple(t for t in given if t is not None)


@dataclass(frozen=True)
class Outputs:
    """Results of a backend: ``o`` [B, T, H, V] undivided; ``denominator`` [B, T, H]; the final states."""

    o: Tensor
    denominator: Tensor | None = None
    state: Tensor | None = None  # [N, H, K, V]
    z: Tensor | None = None  # [N, H, K]
