"""Kinds of mixers besides sequence mixers: cross attention, grids, resampling, feed-forwards.

All are :class:`Mixer` with the same ``project``, ``attend`` and ``read`` (or ``mix``); the call context holds the rest.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor

from linattn.arguments import whole
from linattn.mixers import registry
from linattn.mixers.base import Mixer
from linattn.mixers.context import CallContext, Context, State, from_front, to_front
from linattn.mixers.fault import explain_failure
from linattn.ops import sharding
from linattn.ops.checks import tensor


class CrossMixer(Mixer):
    """Base of mixers that attend to another sequence: x [B, Tq, D] and a context [B, T, D] -> [B, Tq, D].

    ``project`` makes queries of x, and keys and values of ``call.across.tokens``. Every token reads the whole context and no
    other token of x, so x may come in pieces: ``y, state = mixer(x, context, return_state=True)``, then
    ``mixer(further, state=state)``, with an empty context: the state holds that of the first call.
    """

    causal = False
    shards = False

    def arguments(self, x: Tensor) -> tuple[Any, ...]:
        return x, x

    def begin(self, x: Tensor, *others: Any) -> CallContext:
        return CallContext(x, returning=False, context=Context(*others))

    @explain_failure
    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        state: State | None = None,
        return_state: bool = False,
        mask: Tensor | None = None,
        context_mask: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, State]:
        """Attend from ``x`` [B, Tq, D] to ``context`` [B, T, D].

        Args:
            x: the tokens of the queries; Tq may be 0.
            context: the tokens of keys and values; None if ``state`` holds them.
            state: state returned by an earlier call with the same context.
            return_state: also return the state of the context and the position after the last real token of x.
            mask: [B, Tq] bool, True = real token. The output of padding is 0.
            context_mask: [B, T] bool, True = real token; others are ignored.

        Raises:
            ValueError: for a shape that does not fit, and unless exactly one of ``context`` and ``state`` is given.
        """
        if sharding.active() is not None:
            self.check_sharded()
        self.check_width("x", x)
        if (context is None) == (state is None):
            raise ValueError("either context or state must be given")
        if context is None and context_mask is not None:
            raise ValueError("context_mask must be None with a state, which holds the mask")
        across = Context(x.new_zeros(x.shape[0], 0, x.shape[2])) if context is None else self._context(x, context, context_mask)
        lengths, order = None, None
        if mask is not None:
            (x, order), lengths = to_front(x, mask), mask.sum(1)
        call = CallContext(x, state, lengths=lengths, returning=return_state, context=across)
        y = self.mix(x, call)
        if mask is not None:
            y = from_front(y, mask, cast(Tensor, order))
        call.keep("position", call.start + call.counts if return_state else None)
        return (y, call.new) if return_state else y

    def _context(self, x: Tensor, context: Tensor, mask: Tensor | None) -> Context:
        self.check_width("context", context)
        if context.shape[0] != x.shape[0]:
            raise ValueError(f"context must have as many rows as x, {x.shape[0]}, but came with {context.shape[0]}")
        if mask is None:
            return Context(context)
        front, _ = to_front(context, mask, "context_mask")
        return Context(front, torch.arange(context.shape[1], device=x.device) < mask.sum(1)[:, None])


class GridMixer(Mixer):
    """Base of mixers over a grid: x [B, height * width, D], row by row, to the same shape. ``call.grid`` is (height, width)."""

    causal = False
    shards = False

    def arguments(self, x: Tensor) -> tuple[Any, ...]:
        return x, *nearly_square(x.shape[1])

    def begin(self, x: Tensor, *others: Any) -> CallContext:
        height, width = others
        return CallContext(x, returning=False, grid=(height, width))

    def flops(self, x: Tensor, past: int = 0) -> int:
        return super().flops(x, past) if x.shape[1] else 0

    @explain_failure
    def forward(self, x: Tensor, height: int, width: int) -> Tensor:  # type: ignore[override]
        """Mix ``x`` [B, height * width, D] over the grid; height and width may be 0.

        Raises:
            ValueError: if the number of tokens is not height * width.
        """
        if sharding.active() is not None:
            self.check_sharded()
        self.check_width("x", x)
        for name, size in (("height", height), ("width", width)):
            whole(name, size, 0)
        if height * width != x.shape[1]:
            raise ValueError(f"x must have height * width = {height} * {width} tokens, but came with {list(x.shape)}")
        return self.mix(x, self.begin(x, height, width)) if x.shape[1] else x  # empty: torch's convolutions reject it


class Resampler(Mixer):
    """Base of mixers that change the length: [B, T, D] -> [B, T', D], T' = ``resampled(T)``."""

    causal = False
    shards = False

    def resampled(self, lengths: Any) -> Any:
        """Number of output tokens for ``lengths`` tokens, an int or a tensor of them."""
        raise NotImplementedError(f"{type(self).__name__} must implement resampled(lengths)")

    @explain_failure
    def forward(self, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor | None]:  # type: ignore[override]
        """Mix ``x`` [B, T, D] to [B, T', D] and its mask [B, T'] bool, None if ``mask`` is None.

        ``mask`` [B, T] bool, True = real token: a row's output depends on its real tokens only, real tokens first, then zeros.
        """
        if sharding.active() is not None:
            self.check_sharded()
        self.check_width("x", x)
        if mask is None:
            return self.mix(x, self.begin(x)), None
        lengths = mask.sum(1)
        y = self.mix(to_front(x, mask)[0], CallContext(x, lengths=lengths, returning=False))
        real = torch.arange(y.shape[1], device=x.device) < self.resampled(lengths)[:, None]
        return torch.where(real[..., None], y, 0.0), real


class FeedForward(Mixer):
    """Base of token-wise layers: [..., D] -> [..., D]; a subclass implements ``forward(x)``."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "forward" in vars(cls):
            cls.forward = explain_failure(cls.forward)  # type: ignore[method-assign]

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        raise NotImplementedError(f"{type(self).__name__} must implement forward(x)")

    def check_width(self, name: str, x: Tensor) -> None:
        """Raise ValueError unless ``x`` is floating point [..., D] of the mixer's width."""
        if not tensor(name, x).is_floating_point():
            raise ValueError(f"{name} must be floating point, but came as {x.dtype}")
        if not x.ndim or x.shape[-1] != self.dim:
            raise ValueError(f"{name} must have shape [..., D] with D = {self.dim}, but came with {list(x.shape)}")

    def flops(self, x: Tensor, past: int = 0) -> int:
        return self.counted(x)


def nearly_square(tokens: int) -> tuple[int, int]:
    """Height and width of a grid of ``tokens`` tokens, as near to each other as possible."""
    height = next((n for n in range(math.isqrt(tokens), 0, -1) if tokens % n == 0), 0)
    return height, tokens // height if height else 0


def create_bidirectional(name: str, *, dim: int, **options: Any) -> Mixer:
    """Create a bidirectional mixer by name: a grid mixer, or a sequence mixer without causality.

    Raises:
        ValueError: for a name that is not registered, or of a mixer of another kind.
    """
    known = registry.info(name)
    if known.kind != "grid" and not known.bidirectional:
        raise ValueError(f"{name} must be a bidirectional mixer, but it is causal" if known.kind == "sequence" else
                         f"{name} must be a mixer of a sequence or a grid, but it is of the kind {known.kind}")  # fmt: skip
    return registry.create(name, dim=dim, **({"causal": False} if "causal" in known.options else {}) | options)


def over_grid(mixer: Mixer, x: Tensor, height: int, width: int) -> Tensor:
    """Mix ``x`` [B, height * width, D] by a mixer of :func:`create_bidirectional`; a sequence mixer ignores the shape."""
    return mixer(x, height, width) if isinstance(mixer, GridMixer) else mixer(x)
