"""Error measures of oracle tests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn

from linattn.mixers import CallContext, Mixer, Recurrence
from tests.oracles import wheels

if TYPE_CHECKING:
    from linattn.hf.convert.table import Line


class Error(float):
    """A relative error. Errors below a test's bound are reported to listeners, with the precision of the computation.

    Errors with a loose bound are not: those compare an estimate (random features) with its expectation instead of two implementations.
    """

    TIGHT = 1e-3
    listeners: ClassVar[list[Callable[[float, torch.dtype], None]]] = []
    dtype: torch.dtype

    def __lt__(self, bound: float) -> bool:
        below = float(self) < float(bound)
        for hear in self.listeners if below and bound <= self.TIGHT else ():
            hear(float(self), self.dtype)
        return below

    __le__ = __lt__


def distance(got: Tensor, wanted: Tensor, least: float = 0.0) -> Error:
    """‖got − wanted‖ / max(‖wanted‖, ``least``)."""
    error = Error(((got - wanted).norm() / wanted.norm().clamp(min=least)).item())
    error.dtype = min(got.dtype, wanted.dtype, key=lambda dtype: dtype.itemsize)
    return error


def fla(file: str) -> ModuleType:
    """One of fla-core's token by token references, for example "gla"; they compute in float32."""
    return wheels.module("fla-core==0.6.0", f"fla/ops/{file}/naive.py")


def naive_distance(mixer: Mixer, naive: Callable[[Recurrence], Tensor], x: Tensor) -> float:
    """Distance of a mixer from the same projections run through another library's recurrence ``naive``."""
    with torch.no_grad():
        return distance(mixer(x), mixer.read(naive(mixer.project(x, CallContext(x))), x))


def take(mixer: Mixer, weights: Mapping[str, Tensor], lines: Iterable[Line]) -> Mixer:
    """Load a layer's ``weights`` into ``mixer`` by the conversion table of its family."""
    shapes, own = {name: t.shape for name, t in mixer.state_dict().items()}, {}
    for line in lines:
        own |= zip(line.ours, line.read([weights[name] for name in line.theirs], [shapes[name] for name in line.ours]), strict=True)
    mixer.load_state_dict(own)
    return mixer


@torch.no_grad()
def assert_pieces(mixer: Mixer, x: Tensor, wanted: Tensor, lengths: list[int], bound: float = 1e-5) -> None:
    """Assert that the mixer's output for ``x`` is ``wanted``, in one pass and in pieces with the state."""
    assert distance(mixer(x), wanted) < bound
    state, y = None, []
    for piece in x.split(lengths, 1):
        o, state = mixer(piece, state, return_state=True)
        y.append(o)
    assert distance(torch.cat(y, 1), wanted) < bound


def assert_graded(
    ours: Callable[..., Tensor], theirs: Callable[..., Tensor], x: Tensor, weights: Iterable[Tensor] = (), tolerance: float = 1e-12
) -> None:
    """Assert that two layers with the same ``weights`` agree in outputs for ``x`` and gradients of both along a random direction.

    Errors are relative to the norm, at least 1: the gradient of a key's bias under softmax is only rounding.
    """
    runs = []
    for layer in (ours, theirs):
        own = x.clone().requires_grad_()
        y = layer(own)
        direction = torch.randn(y.shape, generator=torch.Generator().manual_seed(0), dtype=y.dtype)
        runs.append([y.detach(), *torch.autograd.grad((y * direction).sum(), [own, *weights], materialize_grads=True)])
    for got, wanted in zip(*runs, strict=True):
        assert got.shape == wanted.shape
        assert distance(got, wanted, 1.0) < tolerance


def assert_decoding(ours: Mixer, theirs: nn.Module, cache: object) -> None:
    """Compare two layers of 32 channels in a prefill of 19 tokens and single steps, ours with a state and theirs with a cache."""
    from linattn.hf.cache import name_of_cache

    x, state = torch.randn(2, 24, 32), None
    y, wanted, name = [], [], name_of_cache(theirs.forward)
    for piece in x.split([19, 1, 1, 1, 1, 1], 1):
        o, state = ours(piece, state, return_state=True)
        y.append(o)
        wanted.append(theirs(piece, **{name: cache}))
    assert distance(torch.cat(y, 1), torch.cat(wanted, 1)) < 1e-5
    assert distance(torch.cat(y, 1), theirs(x)) < 1e-5


def assert_left_padding(ours: Mixer, theirs: Callable[..., Tensor]) -> None:
    """Compare two layers of 32 channels on real tokens, in rows with no and six tokens of left padding."""
    mask = torch.arange(21) >= torch.tensor([0, 6])[:, None]
    x = torch.randn(2, 21, 32)
    y, wanted = ours(x, mask=mask), theirs(x, attention_mask=mask)
    assert distance(y[mask], wanted[mask]) < 1e-5
