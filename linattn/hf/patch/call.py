"""Context of one call of a transformers mixer besides its tokens, and the short convolution that needs it.

The functions that a modeling module calls receive tensors, but not the padding mask, the packing or the cache. The mixer's forward
receives these: while it runs, its :class:`Call` is on a stack of this thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import wraps
from inspect import signature
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from linattn.hf.cache import name_of_cache, pop_cache
from linattn.hf.packing import ENDS, PACKED, borders, breaks, positions, restarts
from linattn.ops.checks import packed_lengths
from linattn.ops.convolution_step import step_
from linattn.ops.gated import gated
from linattn.ops.norms import rms_norm
from linattn.ops.selective_step import selective_step_
from linattn.ops.short_convolution import short_convolution

OURS = "cu_seqlens"  # names of PACKED here and in fla
_SWISH = ("silu", "swish")
_FEW = 2**14  # numel up to which torch's operations are faster than a kernel call
Replacement = tuple[Any, str, Any]  # owner, attribute, replacement


class Family(NamedTuple):
    """Places of a model type's parts in transformers."""

    folder: str  # in transformers.models
    mixer: str  # the class whose forward is one call
    model: str  # class whose forward gets the packing
    head: str = ""  # enclosing class that drops these arguments
    norms: tuple[str, ...] = ()  # classes of RMS norms: weight times normed input, times an activated gate if there is one
    ffns: tuple[str, ...] = ()  # classes of feed-forwards: down_proj(act_fn(gate_proj x) ⊙ up_proj x)
    lost: tuple[str, ...] = ()  # arguments that the model does not pass to its layers: "packing", "padding"


class _Stack(threading.local):
    def __init__(self) -> None:
        self.calls: list[Call] = []


_stack = _Stack()


class Call(NamedTuple):
    """Forward of one mixer, or of the model around it if the mixer receives no context."""

    tokens: int = 0
    real: Tensor | None = None  # [B, T] bool, False for padding; None: every token is real
    cu_seqlens: Tensor | None = None  # [N + 1]; None: nothing is packed
    layer: Any = None  # of the cache; None: no cache
    mixer: Any = None

    def first(self, state: Tensor | None) -> Tensor | None:
        """Initial states of all rows: the first packed sequence continues from ``state`` [1, ...], the others start empty."""
        if state is None or self.cu_seqlens is None:
            return state
        return torch.cat([state, state.new_zeros(self.cu_seqlens.shape[0] - 2, *state.shape[1:])])

    def last(self, state: Tensor) -> Tensor:
        """States that a cache can hold: that of the last packed sequence, from which the next tokens continue."""
        return state if self.cu_seqlens is None else state[-1:]

    def owns(self, state: Tensor, x: Tensor) -> bool:
        """True if ``state`` is the cache's own and, having the dtype of states beside ``x``, can be updated in place."""
        own = self.layer is not None and state is self.layer.recurrent_states[0]
        return own and state.dtype == state_dtype(x) and not torch.is_grad_enabled()

    def only_real(self, t: Tensor, fill: float = 0.0) -> Tensor:
        """Replace padding in ``t`` [B, T, ...] by ``fill``."""
        return t if self.real is None else t.masked_fill(~self.real.view(*self.real.shape, *[1] * (t.ndim - 2)), fill)


def current() -> Call:
    """Innermost call of this thread; outside of any, an empty one."""
    return _stack.calls[-1] if _stack.calls else Call()


class during:
    """Make ``call`` the :func:`current` one within the context."""

    def __init__(self, call: Call) -> None:
        self.call = call

    def __enter__(self) -> None:
        _stack.calls.append(self.call)

    def __exit__(self, *_: object) -> None:
        _stack.calls.pop()


def to_float32(t: Tensor) -> Tensor:
    """Convert ``t`` to the dtype of gates and states: float64 stays, every other dtype becomes float32."""
    return t if t.dtype == torch.float64 else t.float()


def state_dtype(x: Tensor) -> torch.dtype:
    """Dtype of states beside ``x``."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def state_of(state: Tensor, x: Tensor) -> Tensor:
    """Convert a cache's ``state``, or a decay, to the dtype of states beside ``x``."""
    return state.to(state_dtype(x))


def in_place(run: Callable, state: Tensor, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Step of the selective scan in place, for any dtype of the cache."""
    own = state_of(state, x)
    y = run(selective_step_, own, x, *args, **kwargs)
    if own is not state:
        state.copy_(own)
    return y


def padding(attention_mask: Tensor | None, tokens: int) -> Tensor | None:
    """Mask [B, T] of the last ``tokens`` of a mask [B, ...], True for real tokens; None if all are known to be real."""
    if not isinstance(attention_mask, Tensor) or attention_mask.ndim != 2 or tokens == 1:  # a single decoded token is never padding
        return None
    real = attention_mask[:, -tokens:].bool()
    if real.device.type == "cpu" and not torch.compiler.is_compiling() and bool(real.all()):
        return None
    return real


def packing(given: dict[str, Any], like: Tensor) -> Tensor | None:
    """Borders ``cu_seqlens`` from a caller's keywords for sequences packed in ``like`` [B, T, ...], or None."""
    batch, tokens = like.shape[:2]
    for name in (*ENDS, OURS):
        if given.get(name) is not None:
            packed_lengths(_of_one_row(given[name], batch), like, name)
            return given[name].to(torch.int64)
    if given.get("seq_idx") is not None:
        return _of_one_row(borders(given["seq_idx"].view(-1, tokens)[:1].diff() != 0), batch)
    return None


def restarting_positions(given: dict[str, Any], batch: int, tokens: int) -> Tensor | None:
    """Borders ``cu_seqlens`` of one row whose positions restart, or None.

    Several such rows are refused, because layers would treat each as one sequence.
    """
    position_ids, mask = given.get("position_ids"), given.get("attention_mask")
    mask = mask[:, -tokens:] if isinstance(mask, Tensor) and mask.ndim == 2 else None
    if position_ids is None or tokens == 1 or (batch != 1 and (mask is not None or position_ids.ndim != 2)):
        return None
    rows = position_ids if position_ids.ndim == 2 else position_ids[0]
    if rows.shape[1:] != (tokens,):
        return None
    # multi-axis positions also describe images, where they repeat and jump
    starts = breaks(rows) if position_ids.ndim == 2 else (rows.diff() < 0) | (rows[:, 1:] == 0)
    cu = restarts(starts, mask)
    return cu if cu is None else _of_one_row(cu, batch)


def _of_one_row(cu: Tensor, batch: int) -> Tensor:
    if batch != 1:
        raise ValueError(f"packed sequences must be one row, but the batch came with {batch}")
    return cu


def mixer_forward(original: Callable) -> Callable:
    """Wrap a mixer's forward so that its :class:`Call` is :func:`current` meanwhile."""
    name = name_of_cache(original)

    @wraps(original)
    def forward(self: Any, hidden_states: Tensor, cache: Any = None, attention_mask: Tensor | None = None, **kwargs: Any) -> Any:
        tokens = hidden_states.shape[1]
        real = padding(attention_mask, tokens)
        cu = packing(kwargs, hidden_states)
        cu = current().cu_seqlens if cu is None else cu
        cache = pop_cache(kwargs) if cache is None else cache
        layer = None if cache is None else cache.layers[self.layer_idx]
        with during(Call(tokens, real, cu, layer, self)):
            if attention_mask is not None and attention_mask.ndim == 2:
                attention_mask = None if real is None else attention_mask[:, -tokens:]
            return original(self, hidden_states, attention_mask=attention_mask, **kwargs | {name: cache})

    return forward


def passing(original: Callable) -> Callable:
    """Wrap the forward of a layer that does not pass keywords to its mixer, which reads packing from :func:`current`."""

    @wraps(original)
    def forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        with during(Call(cu_seqlens=packing(kwargs, hidden_states))):
            return original(self, hidden_states, *args, **kwargs)

    return forward


def model_forward(original: Callable, lost: tuple[str, ...] = ()) -> Callable:
    """Wrap a model's forward to pass packing to its layers; positions that restart are packed sequences too.

    Packing is passed by keyword, which holds when gradient checkpointing runs a layer again, and for models that do not pass keywords
    on by :func:`current`; padding is passed too, if it is ``lost``.
    """
    parameters = signature(original)

    @wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = dict(parameters.bind(self, *args, **kwargs).arguments)
        given |= given.pop("kwargs", {})
        x = given.get("inputs_embeds") if given.get("input_ids") is None else given["input_ids"]
        if x is None:
            return original(self, *args, **kwargs)  # raises the error
        batch, tokens = x.shape[:2]
        outer, cu = current(), packing(given, x)
        cu = restarting_positions(given, batch, tokens) if cu is None else cu
        cu = outer.cu_seqlens if cu is None else cu
        real = padding(given.get("attention_mask"), tokens) if "padding" in lost else None
        real = outer.real if real is None else real
        if lost and getattr(self, "gradient_checkpointing", False) and self.training:
            _refuse_checkpointing(self, cu, real)
        if cu is not None:
            args, kwargs = (), {name: value for name, value in given.items() if name not in ("self", OURS)} | {PACKED: cu}
            softmax, mask = "position_ids" in parameters.parameters, given.get("attention_mask")
            if softmax and given.get("position_ids") is None:
                kwargs["position_ids"] = positions(cu, tokens)  # softmax attention isolates sequences by restarting positions
            if isinstance(mask, Tensor) and mask.ndim == 2:  # beside a mask softmax attention ignores positions
                if bool(mask.all()):  # a graph break in a compiled model
                    kwargs["attention_mask"] = None
                elif softmax:
                    _refuse_padding(self)
        with during(Call(tokens, real, cu)):
            return original(self, *args, **kwargs)

    return forward


def _refuse_padding(model: Any) -> None:
    raise ValueError(
        f"{type(model).__name__} has softmax attention, which does not isolate packed sequences beside a mask that hides tokens: "
        "omit attention_mask and pack the padding as a sequence of its own"
    )


def _refuse_checkpointing(model: Any, cu: Tensor | None, real: Tensor | None) -> None:
    what = "packed sequences" if cu is not None else "left padding" if real is not None and not bool(real[:, 0].all()) else None
    if what is not None:
        raise ValueError(
            f"{type(model).__name__} does not pass {what} to its layers when gradient checkpointing runs them again: switch it off"
        )


def around(module: ModuleType, family: Family) -> Iterator[Replacement]:
    """Replacements of norms and feed-forwards, and of the forwards that pass packing to the layers."""
    for name in family.norms:
        yield getattr(module, name), "forward", normed(getattr(module, name).forward)
    for name in family.ffns:
        yield getattr(module, name), "forward", swiglu(getattr(module, name).forward)
    for name in filter(None, (family.model, family.head)):
        owner = getattr(module, name)
        yield owner, "forward", model_forward(owner.forward, family.lost)


def normed(original: Callable) -> Callable:
    """Replace an RMS norm by one kernel where that is faster than torch's operations."""

    @wraps(original)
    def forward(self: Any, hidden_states: Tensor, gate: Tensor | None = None) -> Any:
        given = (gate,) if gate is not None else ()
        if hidden_states.numel() < _FEW or any(t.dtype != hidden_states.dtype for t in (self.weight, *given)):
            return original(self, hidden_states, *given)
        if gate is None or self.activation in _SWISH:
            return rms_norm(hidden_states, self.weight, gate, eps=self.variance_epsilon)
        y = rms_norm(to_float32(hidden_states), to_float32(self.weight), eps=self.variance_epsilon)
        if self.activation == "sigmoid":
            return gated(to_float32(gate), y, swish=False).to(hidden_states.dtype)
        return (y * _activated(to_float32(gate), self.activation)).to(hidden_states.dtype)

    return forward


def swiglu(original: Callable) -> Callable:
    """Replace a feed-forward's gate by one kernel where that is faster than torch's operations."""
    from transformers.activations import ACT2FN

    from linattn.generate.captured import hooked

    silu = (torch.nn.SiLU, type(ACT2FN["silu"]))

    @wraps(original)
    def forward(self: Any, x: Tensor) -> Any:
        if x.numel() < _FEW or not isinstance(self.act_fn, silu) or hooked(self.act_fn):
            return original(self, x)
        return self.down_proj(gated(self.gate_proj(x), self.up_proj(x)))

    return forward


def shared(module: ModuleType, family: Family, forward: Callable = lambda original: original) -> Iterator[Replacement]:
    """Replacements shared by all mixers with a short convolution; ``forward`` wraps the original one."""
    mixer = getattr(module, family.mixer)
    yield module, "causal_conv1d_fn", convolve
    yield module, "causal_conv1d_update", convolve_one
    yield mixer, "forward", mixer_forward(forward(mixer.forward))
    if hasattr(module, "create_causal_mask"):
        yield module, "create_causal_mask", _mask_of_packing(module.create_causal_mask)
    yield from around(module, family)


def _mask_of_packing(original: Callable) -> Callable:
    """Wrap the function that makes softmax's mask to pass it packing, because models call it without positions or with those of images."""

    @wraps(original)
    def create_causal_mask(*args: Any, **kwargs: Any) -> Any:
        call = current()
        isolating = {} if call.cu_seqlens is None else {"position_ids": positions(call.cu_seqlens, call.tokens)}
        return original(*args, **kwargs | isolating)

    return create_causal_mask


def absent(*_: Any, **__: Any) -> None:
    """Replace a fused path by None, so that transformers uses the patched functions."""


def convolve(hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **_: Any) -> Tensor:
    """Replace ``causal_conv1d_fn``: hidden_states [B, D, S + T], where the S come from the cache, weight [D, W].

    Padding is skipped: each token sees the real ones before it, and a cache keeps the last real ones. Packed sequences do
    not see each other.
    """
    call, x = current(), hidden_states.transpose(1, 2)
    kept = x.shape[1] - call.tokens
    if call.cu_seqlens is not None:
        y = _packed(x, weight, bias, activation, call, kept)
    elif call.real is not None:
        y = _ragged(x, weight, bias, activation, call, kept)
    else:
        y = _convolved(x, weight, bias, activation)
    return y.transpose(1, 2)


def convolve_one(
    hidden_states: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None
) -> Tensor:
    """Replace ``causal_conv1d_update``: one token hidden_states [B, D, 1] after conv_state [B, D, S], which is updated."""
    x, state = hidden_states.transpose(1, 2), conv_state.transpose(1, 2)
    if weight.shape[-1] == 1:  # a convolution of one tap reads and keeps no earlier token
        return _convolved(x, weight, bias, activation).transpose(1, 2)
    own = state.to(x.dtype)
    swish = activation in _SWISH
    y = step_(x, own, weight[:, None], bias, swish)
    if own is not state:
        state.copy_(own)
    return (y if swish else _activated(y, activation)).transpose(1, 2)


def _convolved(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    swish = activation in _SWISH
    y = short_convolution(x, weight[:, None], bias, activation=swish)
    return y if swish else _activated(y, activation)


def _activated(y: Tensor, activation: str | None) -> Tensor:
    if activation is None:
        return y
    from transformers.activations import ACT2FN

    return ACT2FN[activation](y)


def _ragged(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, call: Call, kept: int) -> Tensor:
    assert call.real is not None
    real = F.pad(call.real, (kept, 0), value=True)  # [B, S + T]
    order = real.int().argsort(dim=1, stable=True)[..., None]  # padding first
    ordered = (x * real[..., None]).gather(1, order.expand(x.shape))
    _keep(ordered, call)
    return _convolved(ordered, weight, bias, activation).gather(1, order.argsort(dim=1).expand(x.shape))


def _packed(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, call: Call, kept: int) -> Tensor:
    assert call.cu_seqlens is not None
    ends, between = call.cu_seqlens[1:] + kept, weight.shape[-1] - 1
    token = torch.arange(x.shape[1], device=x.device)
    slots = token + torch.searchsorted(ends, token, right=True) * between
    longer = x.new_zeros(1, x.shape[1] + (ends.shape[0] - 1) * between, x.shape[2]).index_copy(1, slots, x)
    _keep(longer, call)
    return _convolved(longer, weight, bias, activation).index_select(1, slots)


def _keep(x: Tensor, call: Call) -> None:
    """Store the last real tokens of ``x`` [B, ..., D] in the cache, where transformers stores the last ones, padding or not."""
    if call.layer is not None and not call.layer.record_past:
        state = call.layer.conv_states[0]
        state.copy_(x[:, -state.shape[-1] :].transpose(1, 2))
