"""Parts of a mixer beside its state update: short convolution, gates, positions, norms; detected on random tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from linattn.mixers import CallContext, Mixer
from linattn.mixers.base import Recurrence
from linattn.mixers.parts import ShortConvolution

TOKENS = 256  # more than any mixer's default window


@torch.no_grad()
def parts(mixer: Mixer, dim: int) -> dict[str, Any]:
    """Parts of ``mixer`` in which models of a comparison differ.

    Returns:
        ``grows``: whether the state grows with the tokens. ``conv_width``: tokens of the short convolution, 0 for none. ``norm``:
        whether the mixer has its own norm. None for a mixer without queries, keys and values: ``decay``: "none",
        "constant", "head" or "channel", the last two from the token;
        ``erases``: whether a write removes what its key reads; ``gate``: whether the token scales the output; ``positions``: whether
        keys depend on their position.
    """
    with torch.random.fork_rng(devices=[]):
        x = torch.randn(1, TOKENS, dim)
    found: dict[str, Any] = {
        "grows": _state_bytes(mixer, x) > _state_bytes(mixer, x[:, : TOKENS // 2]),
        "conv_width": max((part.width for part in mixer.modules() if isinstance(part, ShortConvolution)), default=0),
        "norm": any("Norm" in type(part).__name__ for part in mixer.modules()),
        **dict.fromkeys(("decay", "erases", "gate", "positions")),
    }
    if type(mixer).project is Mixer.project:
        return found
    r, context = _projected(mixer, x)
    return found | {
        "decay": "none" if r.decay is None else "constant" if r.decay.ndim <= 2 else "head" if r.decay.ndim == 3 else "channel",
        "erases": r.beta is not None or r.erase is not None,
        "gate": _gated(mixer, mixer.attend(r, context), x),
        "positions": _positioned(mixer, x),
    }


def _projected(mixer: Mixer, x: Tensor) -> tuple[Recurrence, CallContext]:
    context = CallContext(x, returning=False)
    return mixer.recurrence(x, context), context


def _state_bytes(mixer: Mixer, x: Tensor) -> int:
    _, state = mixer(x, return_state=True)
    return sum(t.nbytes for t in state.values())


def _gated(mixer: Mixer, o: Tensor, x: Tensor) -> bool:
    """True if other tokens than ``x`` scale the same output ``o`` of the recurrence differently."""
    here, there = (mixer.read(o, tokens) - mixer.read(torch.zeros_like(o), tokens) for tokens in (x, x.flip(1)))
    return not torch.allclose(here, there, rtol=1e-4, atol=1e-6)


def _positioned(mixer: Mixer, x: Tensor) -> bool:
    """True if a repeated token has a different key at each position, short convolutions excluded."""
    keys = _projected(mixer, x[:, :1].expand_as(x))[0].k[0, TOKENS // 2 :]
    return not torch.allclose(keys, keys[:1].expand_as(keys), rtol=1e-4, atol=1e-6)
