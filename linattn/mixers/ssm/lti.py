"""Base of time-invariant state-space mixers: a system (A, B, C) for each channel, run by :func:`linattn.lti`."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from linattn.mixers.base import Mixer, Recurrence
from linattn.mixers.context import CallContext
from linattn.mixers.parts import to_float32
from linattn.ops import diagonal_scan, lti
from linattn.ops.checks import no_autocast

INITS = ("lin", "inv")


class StateSpace(Mixer):
    """Mixer that runs values through time-invariant systems, one a head: by convolution for a sequence, by recurrence for a token.

    State: ``S`` [rows, H, K, V], complex numbers as a last axis of two.
    """

    shards = True

    state_size: int  # real numbers of state per channel, twice the conjugate pairs

    def system(self) -> tuple[Tensor, Tensor, Tensor]:
        """A, B and C as :func:`linattn.lti` takes them."""
        raise NotImplementedError

    def attend(self, r: Recurrence, call: CallContext) -> Tensor:
        old, (a, b, c) = call.get("S"), self.system()
        if old is not None and a.is_complex():
            old = torch.view_as_complex(old)
        o = lti(r.v, a, b, c, old, return_state=call.returning, lengths=call.lengths, cu_seqlens=call.cu_seqlens)
        if isinstance(o, Tensor):
            return o
        call.keep("S", torch.view_as_real(o[1]) if o[1].is_complex() else o[1])
        return o[0]

    def attend_flops(self, r: Recurrence, past: int) -> int:
        return 4 * r.v.numel() * self.state_size  # half as many complex numbers, each written and read


def values(u: Tensor, skip: Tensor) -> Recurrence:
    """Recurrence with ``u`` [B, T, D] as the values of D heads of one channel; queries and keys are 1.

    ``skip`` [B, T, D] is added to the output.
    """
    one = u.new_ones(()).expand(*u.shape, 1)
    return Recurrence(one, one, u[..., None], scale=1.0, skip=skip[..., None])


def spectrum(init: str, size: int, channels: int) -> tuple[Tensor, Tensor]:
    """Eigenvalues of S4D (arXiv 2206.11893) as log(−Re A) and Im A, each [D, K / 2].

    ``"lin"``: A_n = −1/2 + i π n; ``"inv"``: A_n = −1/2 + i K / π (K / (2n + 1) − 1).
    """
    if init not in INITS:
        raise ValueError(f"init must be one of {', '.join(map(repr, INITS))}, but came as {init!r}")
    n = torch.arange(pairs(size), dtype=torch.float32)
    imaginary = math.pi * n if init == "lin" else size / math.pi * (size / (2 * n + 1) - 1)
    return torch.full((channels, len(n)), math.log(0.5)), imaginary.repeat(channels, 1)


def pairs(size: int) -> int:
    """Number of complex values in a state of ``size`` real ones."""
    if size < 2 or size % 2:
        raise ValueError(f"state_size must be even and at least 2, since states come in conjugate pairs, but came as {size}")
    return size // 2


def log_steps(channels: int, low: float, high: float) -> Tensor:
    """Logarithms of time steps, spread evenly over [low, high], a mixer's dt_min and dt_max."""
    if not 0 < low <= high < math.inf:
        raise ValueError(f"time steps must be 0 < dt_min <= dt_max, both finite, but came as dt_min {low} and dt_max {high}")
    return torch.empty(channels, dtype=torch.float32).uniform_(math.log(low), math.log(high))


def complex_parameter(*shape: int, std: float = 1.0) -> nn.Parameter:
    """Complex normal numbers of variance ``std``² as pairs of reals, float32."""
    return nn.Parameter(torch.randn(*shape, 2, dtype=torch.float32) * (std * math.sqrt(0.5)))


def as_complex(pair: Tensor) -> Tensor:
    """Convert [..., 2] to complex [...], complex64, or complex128 for float64."""
    return torch.view_as_complex(to_float32(pair).contiguous())


def shared_states(x: Tensor, log: Tensor, b: Tensor, c: Tensor, call: CallContext) -> Tensor:
    """Run ``h_t = e^log h_{t-1} + B x_t``, ``y_t = Re(C h_t)``: one system with an input and output for every channel.

    ``x`` [B, T, D]; ``log`` [P], ``b`` [P, D] and ``c`` [D, P] complex. Returns y [B, T, D], float32 or float64. State: ``h`` [rows, P, 2].
    """
    old, x = call.get("h"), to_float32(x)
    with no_autocast(x):
        written = torch.view_as_complex((x @ torch.view_as_real(b).transpose(1, 2).flatten(0, 1).mT).unflatten(-1, (-1, 2)))  # [B, T, P]
        decay = log.to(written.dtype)
        if call.valid is not None:
            real = call.valid[..., None]
            written, decay = torch.where(real, written, 0.0), torch.where(real, decay, 0.0)
        initial = None if old is None else torch.view_as_complex(old)
        h, last = diagonal_scan(decay, written, initial_state=initial, return_state=True, cu_seqlens=call.cu_seqlens)
        call.keep("h", torch.view_as_real(last))
        return torch.view_as_real(h).flatten(-2) @ torch.view_as_real(c.conj().resolve_conj()).flatten(-2).mT


def shared_flops(x: Tensor, states: int, weights: int) -> int:
    """Multiplications and additions of :func:`shared_states`, and of linear maps with ``weights`` weights."""
    return x.shape[0] * x.shape[1] * (8 * states + 8 * states * x.shape[2] + 2 * weights)
