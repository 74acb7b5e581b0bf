"""Layers of a served model: mixers whose states lie in vLLM's pages, and softmax over vLLM's keys and values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

from linattn.mixers.attention.softmax import Softmax
from linattn.mixers.context import CallContext
from linattn.vllm import states
from linattn.vllm.batch import Batch, Paged
from linattn.vllm.config import filled
from linattn.vllm.layout import Layout


@dataclass
class Call:
    """Data of one forward pass that all layers read: ``positions`` [T] of its tokens, and ``pages`` bytes of every layer's page."""

    nbytes: int = 0
    positions: Tensor = field(default_factory=lambda: torch.empty(0))


class Recurrent(nn.Module, MambaBase):
    """Replacement of a block's mixer with states of constant size in vLLM's pages; ``layer`` is its number in the model."""

    def __init__(self, inner: Any, fresh: dict[str, Tensor], layer: int, call: Call, vllm_config: Any) -> None:
        super().__init__()
        self.inner, self.layer, self.call, self.shares = inner, layer, call, inner.shares
        self.fresh, self.layout = fresh, Layout(fresh)  # state before the first token, which may depend on weights
        call.nbytes = max(call.nbytes, self.layout.nbytes)
        self.kv_cache: tuple[Tensor, ...] = ()
        self.prefix = f"layers.{layer}.mixer"
        vllm_config.compilation_config.static_forward_context[self.prefix] = self

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        """Bytes of a page: those of the largest layer, so that all layers have equal pages."""
        return ((self.call.nbytes,),)

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        """Dtype of a page: bytes, in which the layout places tensors of any dtype."""
        return (torch.uint8,)

    @property
    def mamba_type(self) -> Any:
        """Kind of metadata: starts and pages of the sequences."""
        return MambaAttentionBackendEnum.LINEAR

    def forward(self, x: Tensor, state: None = None, *, shared: Tensor | None = None, return_shared: bool = False, **how: Any) -> Any:
        """Mix ``x`` [1, T, D] from the states in the pages and leave the new ones there."""
        metadata = get_forward_context().attn_metadata
        if metadata is None or not self.kv_cache:  # in vLLM's memory profiling
            y, passed = self._alone(x, shared)
        else:
            y, passed = self._paged(x, Batch.of(metadata[self.prefix]), shared)
        return (y, None, passed) if return_shared else y

    def _alone(self, x: Tensor, shared: Tensor | None) -> tuple[Tensor, Tensor | None]:
        if not self.shares:
            return self.inner(x), None
        y, _, passed = self.inner(x, shared=shared, return_shared=True)
        return y, passed

    def _paged(self, x: Tensor, batch: Batch, shared: Tensor | None) -> tuple[Tensor, Tensor | None]:
        n, pages = batch.tokens, self.kv_cache[0]
        given = states.ROWS.given(self.layer)
        own = None if shared is None else shared[:, :n]
        y, passed = Paged(self.inner, pages, self.layout, self.fresh).run(x[:, :n], batch, own, given)
        states.ROWS.keep(self.layer, self.layout, pages, batch.index)
        fill = x.shape[1] - n  # padding of a graph
        return _padded(y, fill), None if passed is None else _padded(passed, fill)


def _padded(x: Tensor, fill: int) -> Tensor:
    """Tokens ``x`` [1, T, ...] and ``fill`` zeros behind them."""
    return F.pad(x, (*[0] * (2 * x.ndim - 4), 0, fill)) if fill else x


class Positioned(CallContext):
    """Call context of tokens with positions given by vLLM."""

    def __init__(self, x: Tensor, positions: Tensor) -> None:
        super().__init__(x, returning=False)
        self._positions = positions

    @property
    def positions(self) -> Tensor:
        """Position of each token, [1, T]."""
        return self._positions[None].long()


class Attending(nn.Module):
    """Replacement of a block's softmax mixer that uses vLLM's pages of keys and values."""

    shares = False

    def __init__(self, inner: Softmax, layer: int, call: Call, vllm_config: Any) -> None:
        super().__init__()
        self.inner, self.call, self.size = inner, call, filled(inner.size)
        self.attention = Attention(
            inner.heads, self.size, inner.size**-0.5, inner.kv_heads, cache_config=vllm_config.cache_config, prefix=f"layers.{layer}.attn"
        )

    def forward(self, x: Tensor, state: None = None, **how: Any) -> Tensor:
        """Attend from every token of ``x`` [1, T, D] to those of its sequence up to itself."""
        r = self.inner.recurrence(x, Positioned(x, self.call.positions))
        fill = self.size - self.inner.size
        q, k, v = (F.pad(t[0], (0, fill)).flatten(1) for t in (r.q, r.k, r.v))  # zero channels do not change scores
        o = self.attention(q, k, v).view(1, -1, self.inner.heads, self.size)[..., : self.inner.size]
        return self.inner.read(o, x)
