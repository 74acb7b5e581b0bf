"""Algebra of one mixer, measured: the recurrence that reproduces its output, linearity in its values, its mixing matrices."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from linattn.mixers import CallContext, Mixer
from linattn.mixers.base import Recurrence
from linattn.mixers.parts import ShortConvolution

CLOSE = 1e-9  # relative distance, in float64, below which two outputs count as equal


@dataclass(frozen=True)
class Spec:
    """Specification of a mixer's recurrence, from which its cell is drawn.

    Args:
        decay: "none", "constant", "head" or "channel".
        erase: "none", "delta" (beta) or "pair" (erase).
        bonus: the token itself is read with a separate weight, before it is written.
        normalize: the output is divided by q z.
        skip: the value is added to the output.
        sizes: H, K and V.
        steps: steps of the recurrence for each token, of which the last is read.
        conv: width of a short convolution before the recurrence, 0 for none.
        gate: the output is multiplied by a data-dependent gate.
    """

    decay: str
    erase: str
    bonus: bool
    normalize: bool
    skip: bool
    sizes: tuple[int, int, int]
    steps: int = 1
    conv: int = 0
    gate: bool = False

    @property
    def rule(self) -> str:
        """Operation on the state before a write: none, constant, head, channel or erase."""
        return "erase" if self.erase != "none" else self.decay


@dataclass(frozen=True)
class Matrices:
    """Mixing matrices [H · n, T, T] for n values per token and head, ordered by head, then by value."""

    cells: Tensor
    values: int  # n


def has_values(mixer: Mixer) -> bool:
    """True if the mixer's code has queries, keys and values: it implements ``project``."""
    return type(mixer).project is not Mixer.project


def specification(mixer: Mixer, x: Tensor) -> Spec | None:
    """Specification of the recurrence of ``mixer``; None if its output on ``x`` is not that recurrence's."""
    if not has_values(mixer):
        return None
    r = mixer.recurrence(x, begin(mixer, x))
    steps = _steps(mixer, r, x)
    if not steps:
        return None
    decay = "none" if r.decay is None else "constant" if r.decay.ndim <= 2 else "head" if r.decay.ndim == 3 else "channel"
    return Spec(
        decay=decay,
        erase="delta" if r.beta is not None else "pair" if r.erase is not None else "none",
        bonus=r.bonus is not None,
        normalize=r.normalize is not False,
        skip=r.skip is not None,
        sizes=(max(r.q.shape[2], r.v.shape[2] // steps), r.k.shape[3], r.v.shape[3]),
        steps=steps,
        conv=next((part.width for part in mixer.modules() if isinstance(part, ShortConvolution)), 0),
        gate=_gated(mixer, x),
    )


def _gated(mixer: Mixer, x: Tensor) -> bool:
    """True if the output scales with the token for equal outputs of the recurrence; zero-initialised weights are drawn for this check."""
    mixer = copy.deepcopy(mixer)
    draw = torch.Generator().manual_seed(0)
    for weight in mixer.parameters():
        if not weight.any():
            weight.copy_(torch.randn(weight.shape, generator=draw, dtype=weight.dtype))
    call = begin(mixer, x)
    o = mixer.attend(mixer.recurrence(x, call), call)
    if mixer.read(o, x).shape != x.shape:
        return False
    here, there = (mixer.read(o, tokens) - mixer.read(torch.zeros_like(o), tokens) for tokens in (x, 1 + x.flip(1)))
    return not _equal(here, there)


def _steps(mixer: Mixer, r: Recurrence, x: Tensor) -> int:
    """Steps per token with which the plain recurrence of ``r`` reproduces the mixer's output; 0 if it does not."""
    if r.v.shape[1] != x.shape[1]:
        return 0
    if r.k.shape[:3] == r.q.shape[:3] and r.v.shape[2] % r.k.shape[2] == 0:
        return int(_is_recurrence(mixer, r, x))
    steps = r.v.shape[2] // r.q.shape[2]
    several = steps > 1 and r.k.shape[2] == r.v.shape[2] == steps * r.q.shape[2] and mixer.causal
    return steps if several and _equal(_in_steps(mixer, r, steps), mixer.attend(r, begin(mixer, x))) else 0


def _is_recurrence(mixer: Mixer, r: Recurrence, x: Tensor) -> bool:
    """True if the plain recurrence of ``r``, read by the mixer, gives the mixer's output, up to the mixer's own division."""
    plain = cast("Tensor | tuple[Tensor, Tensor]", Mixer.attend(mixer, r, begin(mixer, x)))  # a pair where r.normalize is "return"
    if not isinstance(plain, Tensor):
        own, plain = mixer.attend(r, begin(mixer, x)), plain[0]
        along = (own * plain).sum(-1, keepdim=True) * plain  # equal directions [B, T, H, V]: one factor for a head of a token
        return _equal(own * (plain * plain).sum(-1, keepdim=True), along)
    if type(mixer).mix is Mixer.mix:
        return _equal(mixer.attend(r, begin(mixer, x)), plain)
    o = plain if r.skip is None else plain + r.skip
    return _equal(mixer.read(o, x), mixer(*mixer.arguments(x)))


def _in_steps(mixer: Mixer, r: Recurrence, n: int) -> Tensor:
    """Run the plain recurrence over T · n steps, the heads of ``r`` being those of step 1, then of step 2, and read each token's last."""

    def spread(t: Tensor) -> Tensor:
        return t.unflatten(2, (n, -1)).flatten(1, 2)  # [B, T, n H, ...] -> [B, T n, H, ...]

    q = F.pad(r.q[:, :, None], (0, 0, 0, 0, n - 1, 0)).flatten(1, 2)
    decay = None if r.decay is None else F.pad(r.decay[:, :, None], (0, 0) * (r.decay.ndim - 2) + (0, n - 1)).flatten(1, 2)
    beta = None if r.beta is None else spread(r.beta)
    steps = replace(r, q=q, k=spread(r.k), v=spread(r.v), beta=beta, decay=decay)
    return Mixer.attend(mixer, steps, CallContext(q.flatten(2), returning=False))[:, n - 1 :: n]


def matrices(mixer: Mixer, x: Tensor) -> Matrices | None:
    """Mixing matrices whose products with the values are the input of ``read``; None if there is no matrix per head."""
    if not has_values(mixer):
        return None
    r = mixer.recurrence(x, begin(mixer, x))
    own = mixer.attend(r, begin(mixer, x))  # [B, T, H, V]
    heads, written = own.shape[2], r.v.shape[2]
    n = written // heads if written % heads == 0 else 1
    try:
        parts = [_shares(mixer, r, x, slice(j * written // n, (j + 1) * written // n)) for j in range(n)]
    except (RuntimeError, ValueError):  # values have per-channel weights, so unit vectors in their place do not fit
        return None
    v = r.v.unflatten(2, (n, -1)).repeat_interleave(max(heads // written, 1), 3)  # [B, T, n, H, V]
    product = sum(torch.einsum("bhij,bjhv->bihv", part, v[:, :, j]) for j, part in enumerate(parts))
    return Matrices(torch.stack(parts, 2)[0].flatten(0, 1), n) if _equal(cast(Tensor, product), own) else None


def _shares(mixer: Mixer, r: Recurrence, x: Tensor, heads: slice) -> Tensor:
    """Shares of the values of ``heads`` in the outputs, [B, H, T, S]: the mixer runs with unit vectors in their place."""
    batch, tokens, count, _ = r.v.shape
    units = r.v.new_zeros(batch, tokens, count, tokens)
    units[:, :, heads] = torch.eye(tokens, dtype=r.v.dtype)[:, None]
    return mixer.attend(replace(r, v=units), begin(mixer, x)).permute(0, 2, 1, 3)


def nonlinearity(mixer: Mixer, x: Tensor) -> float | None:
    """Relative distance of f(a + 2 b) to f(a) + 2 f(b), f being the mixer's output of random values; None without values."""
    if not has_values(mixer):
        return None
    r = mixer.recurrence(x, begin(mixer, x))
    a, b = (torch.randn(r.v.shape, generator=torch.Generator().manual_seed(seed), dtype=r.v.dtype) for seed in (1, 2))
    of_a, of_b, of_both = (mixer.attend(replace(r, v=v), begin(mixer, x)) for v in (a, b, a + 2 * b))
    return ((of_a + 2 * of_b - of_both).norm() / of_both.norm()).item()


def begin(mixer: Mixer, x: Tensor) -> CallContext:
    """Call context of the tokens ``x`` with the default arguments."""
    return mixer.begin(*mixer.arguments(x))


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool((a - b).norm() <= CLOSE * b.norm())
