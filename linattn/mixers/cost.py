"""Cost of any mixer, measured by running it on tensors without storage."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules.batchnorm import _BatchNorm

from linattn.arguments import whole
from linattn.mixers import registry
from linattn.mixers.base import Mixer

_MOST = 10**15  # limit of tokens and rows, so that their product with a width fits 64 bits


@dataclass(frozen=True)
class Cost:
    """Cost of one layer.

    ``flops`` counts multiplications and additions (a product of matrices [m, k] and [k, n] is 2mkn) of one pass over
    ``batch`` sequences of ``tokens``, and ``step_flops`` those of one more token in each of them: linear maps, convolutions
    and the recurrence token by token; softmax over the visible tokens. Gates and norms are not counted.
    A backward pass is about twice as much again.

    ``state_bytes`` is the size of the state that ``mixer(x, return_state=True)`` returns after ``tokens`` tokens in ``dtype``:
    every tensor of it, positions (int64) and float32 states included. ``softmax_cache_bytes`` is the same for softmax
    attention of the same width with as many key-value heads as heads. A mixer without states, such as a bidirectional one, has
    neither steps nor state: both are None. ``tokens`` is then the length of the sequence and of the context, or the size of a nearly
    square grid.
    """

    name: str
    dim: int
    tokens: int
    batch: int
    dtype: torch.dtype
    parameters: int
    flops: int
    step_flops: int | None
    state_bytes: int | None
    softmax_cache_bytes: int


def cost(name: str, *, dim: int, tokens: int, batch: int = 1, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Cost:
    """Compute parameters, operations and bytes of state of the mixer ``name``; ``options`` are those of ``create``.

    No tensor is stored, so that most mixers take no longer for ``tokens=1_000_000`` than for 100.

    Raises:
        ValueError: for a name that is not registered, for ``tokens`` and ``batch`` that are not integers of at least 0, and for a ``dtype``
            that is not floating point.
        TypeError: for an option that the mixer does not have.
    """
    for argument, value in (("tokens", tokens), ("batch", batch)):
        if whole(argument, value, 0) > _MOST:
            raise ValueError(f"{argument} must be at most {_MOST:,}, but came as {value:,}")
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"dtype must be a torch.dtype of floating point, but came as {dtype!r}")
    mixer, cache_bytes = _on_meta(name, dim, dtype, options), _softmax_cache_bytes(dim, tokens, batch, dtype)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        mixer = mixer.to_empty(device="cpu")
        for module in mixer.modules():
            if isinstance(module, _BatchNorm):
                module.eval()  # batch norms need several positions in training
        x = torch.empty(batch, tokens, dim, dtype=dtype)
        resumable = mixer.causal and mixer.info.kind == "sequence"
        return Cost(
            name, dim, tokens, batch, dtype,
            parameters=sum(p.numel() for p in mixer.parameters()),
            flops=mixer.flops(x),
            step_flops=mixer.flops(x.new_empty(batch, 1, dim), past=tokens) if resumable else None,
            state_bytes=_state_bytes(mixer, x) if resumable else None,
            softmax_cache_bytes=cache_bytes,
        )  # fmt: skip


@cache
def _softmax_cache_bytes(dim: int, tokens: int, batch: int, dtype: torch.dtype) -> int:
    """Bytes of softmax attention's cache at the same width; computed once without rotary positions, for any number of heads."""
    softmax = _on_meta("softmax", dim, dtype, {"heads": 1, "rotated": 0})
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        return _state_bytes(softmax.to_empty(device="cpu"), torch.empty(batch, tokens, dim, dtype=dtype))


def _on_meta(name: str, dim: int, dtype: torch.dtype, options: dict) -> Mixer:
    """Make and convert the mixer on the meta device, since a fake parameter cannot be converted to another dtype."""
    with torch.device("meta"):
        return registry.create(name, dim=dim, **options).to(dtype)


def _state_bytes(mixer: Mixer, x: Tensor) -> int:
    """Bytes of the state after running the mixer: on one token if the state does not grow, in large segments if it works piece by piece."""
    if mixer.piece is not None:
        mixer.piece = 1 << 16  # pieces only limit memory, which is not allocated here
    x = x[:, :1] if mixer.info.recurrent else x
    shared = mixer.example_shared(x)
    _, state = mixer(x, return_state=True, **({} if shared is None else {"shared": shared}))
    return sum(t.nbytes for t in state.values())
