"""Checks of arguments, shared by the public functions. An error names the argument, the value and what was expected."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from linattn.arguments import described
from linattn.ops import tracing
from linattn.ops.inputs import Bonus, Delta, Erase, Given, Inputs, Plain, Rule

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
HEADS_FIRST = "; time stands before heads here: of tensors [B, H, T, K] pass t.transpose(1, 2)"
EPS = 1e-6  # epsilon of normalize=True, as in the Linear Transformer
_debugging = ContextVar("linattn_debug", default=False)


@contextmanager
def debug() -> Iterator[None]:
    """Context in which values (a positive decay, the content of ``cu_seqlens``) are checked on a GPU too, which synchronises."""
    token = _debugging.set(True)
    try:
        yield
    finally:
        _debugging.reset(token)


def values_visible(t: Tensor) -> bool:
    """True if values of ``t`` can be read without breaking a graph or transform or, outside ``debug``, waiting for a device."""
    return not tracing.hides_values(t) and (t.device.type == "cpu" or (_debugging.get() and t.device.type != "meta"))


def no_autocast(t: Tensor) -> AbstractContextManager:
    """Context without autocast on the device of ``t``, so that float32 states stay in float32."""
    device = t.device.type
    return torch.autocast(device, enabled=False) if device != "meta" and torch.is_autocast_enabled(device) else nullcontext()


def number(name: str, value: object) -> float:
    """Convert a Python number to float; raise ValueError for others, such as tensors, which would lose their gradient."""
    if isinstance(value, bool) or not isinstance(value, (Real, torch.SymInt, torch.SymFloat)):
        raise ValueError(f"{name} must be a number, but came as {described(value)}")
    return float(value)


def flag(name: str, value: object) -> bool:
    """Return ``value``; raise ValueError unless it is True or False."""
    if value is not True and value is not False:
        raise ValueError(f"{name} must be True or False, but came as {described(value)}")
    return value


def choice(name: str, value: object, options: Sequence[str]) -> None:
    """Raise ValueError unless ``value`` is one of the strings ``options``."""
    if not isinstance(value, str) or value not in options:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, options))}, but came as {described(value)}")


def shape(name: str, t: Tensor, wanted: str, *shapes: tuple[int, ...]) -> None:
    """Raise ValueError unless ``t`` has one of ``shapes``; ``wanted`` names the dimensions."""
    if tuple(t.shape) not in shapes and not any(_same(t.shape, s) for s in shapes):
        options = " or ".join(str(list(s)) for s in shapes)
        raise ValueError(f"{name} must have shape {wanted} = {options}, but came with {list(t.shape)}{_heads_first(t.shape, *shapes)}")


def _heads_first(came: Sequence[int], *wanted: Sequence[int]) -> str:
    """Hint for an error if ``came`` has one of the ``wanted`` shapes [B, T, H, ...] with time and heads exchanged."""
    if any(len(came) == len(s) > 2 and _same((came[0], came[2], came[1], *came[3:]), s) for s in wanted):
        return HEADS_FIRST
    return ""


def _same(one: Sequence[int], other: Sequence[int]) -> bool:
    """Compare shapes size by size: torch.compile considers tuples different if one has a number and the other a symbol for it."""
    return len(one) == len(other) and all(a == b for a, b in zip(one, other, strict=True))


def tensor(name: str, t: object, like: Tensor | None = None) -> Tensor:
    if not isinstance(t, Tensor):
        raise TypeError(f"{name} must be a tensor, but came as {type(t).__name__}")
    if type(t).__name__ == "DTensor":  # by name: torch.distributed.tensor takes half a second to import
        raise TypeError(f"{name} must be a plain tensor, but came as a DTensor: give t.to_local(), or call under torch's local_map")
    if t.layout != torch.strided or t.is_nested:
        raise ValueError(f"{name} must be a dense tensor, but came as a {'nested' if t.is_nested else t.layout} one")
    if like is not None and t.device != like.device:
        raise ValueError(f"{name} must be on {like.device} like the other arguments, but is on {t.device}")
    return t


def dtype(name: str, t: Tensor, *wanted: torch.dtype) -> None:
    if t.dtype not in wanted:
        options = " or ".join(dict.fromkeys(str(d) for d in wanted))
        raise ValueError(f"{name} must be {options}, but came as {t.dtype}")


def normalizer(value: bool | float | str) -> float | str | None:
    """Convert the argument ``normalize`` to the epsilon, ``"return"``, or None without a normaliser."""
    if value is True:
        return EPS
    if value is False or value is None:
        return None
    if isinstance(value, str) and value == "return":
        return "return"
    if isinstance(value, (int, float)) and 0 <= value < math.inf:
        return float(value)
    raise ValueError(f'normalize must be True, False, an epsilon >= 0 or "return", but came as {described(value)}')


def call(x: Given) -> tuple[Inputs, float | str | None]:
    """Check the arguments of :func:`linattn.linear_attention`; return them as data, and the epsilon or mode of :func:`normalizer`."""
    mode = normalizer(x.normalize)
    flag("causal", x.causal)
    flag("return_state", x.return_state)
    denominator = mode is not None
    _combinations(x, denominator)
    _sequences(x.q, x.k, x.v, x.causal)
    (batch, tokens), heads, size = x.k.shape[:2], x.v.shape[2], x.k.shape[3]
    if x.cu_seqlens is not None:
        _packed(x.cu_seqlens, x.q, x.k)
    if x.decay is not None:
        _decay(tensor("decay", x.decay, x.v), x.q.dtype, (batch, tokens, heads, size))
    rule = _rule(x, (batch, tokens, heads, size))
    rows = batch if x.cu_seqlens is None else x.cu_seqlens.shape[0] - 1
    initial, z = _initial(x.initial_state, x.v, denominator, (rows, heads, size, x.v.shape[3]))
    if not tracing.hides_values(x.q):
        _warn_heads_first(x.q)
    scale = size**-0.5 if x.scale is None else number("scale", x.scale)
    return Inputs(x.q, x.k, x.v, scale, x.decay, rule, denominator, x.causal, initial, z, x.return_state, x.cu_seqlens), mode


def _rule(x: Given, full: tuple[int, int, int, int]) -> Rule:
    """Build the rule of a call whose arguments have passed :func:`_combinations`; ``full`` is [B, T, H, K]."""
    if x.beta is not None:
        _extra("beta", x.beta, x.v, "[B, T, H]", full[:3])
        return Delta(x.beta)
    if x.erase is not None:
        if not isinstance(x.erase, (tuple, list)) or len(x.erase) != 2:
            raise ValueError(f"erase must be a pair (read, write) of tensors [B, T, H, K], but came as {described(x.erase)}")
        for name, t in zip(("erase[0] (read)", "erase[1] (write)"), x.erase, strict=True):
            _extra(name, t, x.v, "[B, T, H, K]", full)
        return Erase(*x.erase)
    if x.bonus is not None:
        _extra("bonus", x.bonus, x.v, "[H, K]", full[2:])
        return Bonus(x.bonus)
    return Plain()


def _combinations(x: Given, denominator: bool) -> None:
    given = {name: value is not None for name, value in (("decay", x.decay), ("beta", x.beta), ("erase", x.erase), ("bonus", x.bonus))}
    if given["beta"] and given["erase"]:
        raise ValueError("beta and erase exclude each other: beta is the erase with read = α⊙k, write = −βk and value βv")
    for name in ("bonus", "beta", "erase"):
        if denominator and given[name]:
            raise ValueError(f"normalize and {name} exclude each other: z, the sum of the keys, is undefined if {_why[name]}")
    for name in ("beta", "erase"):
        if given["bonus"] and given[name]:
            raise ValueError(f"bonus and {name} exclude each other: the bonus reads the state before a token is written, {name} changes it")
    if not x.causal:
        for name, there in given.items():
            if there:
                raise ValueError(f"causal=False and {name} exclude each other: without an order of the tokens nothing can {_order[name]}")


_why = {"bonus": "the current token has its own weight", "beta": "values are overwritten", "erase": "values are erased"}
_order = {"decay": "fade", "beta": "be overwritten", "erase": "be erased", "bonus": "be the current token"}


def _warn_heads_first(q: Tensor) -> None:
    """Warn a caller outside of linattn whose queries have many more heads than tokens, as [B, H, T, K] would look here."""
    tokens, heads = q.shape[1], q.shape[2]
    if not 1 < tokens <= heads // 4 or heads < 64:
        return
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("linattn.ops."):
        frame, level = frame.f_back, level + 1
    if not frame.f_globals.get("__name__", "").startswith("linattn."):
        words = f"q came with {list(q.shape)}, which is read as T = {tokens} tokens of H = {heads} heads"
        warnings.warn(f"{words}{HEADS_FIRST}", UserWarning, stacklevel=level)


def _sequences(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> None:
    for name, t, dims in (("q", q, "[B, T, Hk, K]"), ("k", k, "[B, T, Hk, K]"), ("v", v, "[B, T, H, V]")):
        if tensor(name, t).ndim != 4:
            raise ValueError(f"{name} must have shape {dims}, but came with {list(t.shape)}")
        dtype(name, t, *(DTYPES if t is q else (q.dtype,)))
        tensor(name, t, q)
    batch, length, heads, size = q.shape
    shape("k", k, "[B, T, Hk, K] of q", (batch, length if causal else k.shape[1], heads, size))
    if v.shape[:2] != k.shape[:2]:
        hint = _heads_first(v.shape[:3], (*k.shape[:2], v.shape[1]))
        raise ValueError(f"v must have shape [B, T, H, V] with [B, T] = {list(k.shape[:2])} of k, but came with {list(v.shape)}{hint}")
    if heads == 0 or v.shape[2] == 0 or v.shape[2] % heads:
        raise ValueError(f"the heads of v must be a multiple of those of q and k (Hk = {heads}), but v came with H = {v.shape[2]}")
    if size == 0 or v.shape[3] == 0:
        raise ValueError(f"K and V must be at least 1, but q came with {list(q.shape)} and v with {list(v.shape)}")


def _decay(decay: Tensor, q_dtype: torch.dtype, full: tuple[int, int, int, int]) -> None:
    _, _, heads, size = full
    wanted = {1: "[H]", 2: "[H, K]", 3: "[B, T, H]", 4: "[B, T, H, K]"}
    if decay.ndim not in wanted:
        raise ValueError(f"decay must have shape [H], [H, K], [B, T, H] or [B, T, H, K], but came with {list(decay.shape)}")
    shape("decay", decay, wanted[decay.ndim], {1: (heads,), 2: (heads, size), 3: full[:3], 4: full}[decay.ndim])
    dtype("decay", decay, q_dtype, _compute_dtype(q_dtype))
    not_positive("decay", decay)


def not_positive(name: str, decay: Tensor) -> None:
    if not decay.numel() or not values_visible(decay):
        return
    largest = decay.detach().amax().item()  # one pass over the numbers; a mask would cost as much as the recurrence on a CPU
    if largest > 0:
        raise ValueError(f"{name} is the natural logarithm of a factor in [0, 1] and must be <= 0, but its largest value is {largest:g}")


def _extra(name: str, t: Tensor, v: Tensor, wanted: str, size: tuple[int, ...]) -> None:
    shape(name, tensor(name, t, v), wanted, size)
    dtype(name, t, v.dtype, _compute_dtype(v.dtype))


def _compute_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _initial(state: Any, v: Tensor, denominator: bool, full: tuple[int, int, int, int]) -> tuple[Tensor | None, Tensor | None]:
    if state is None:
        return None, None
    if denominator and (not isinstance(state, (tuple, list)) or len(state) != 2):
        raise ValueError(f"initial_state must be the pair (S, z) with normalize, but came as {described(state)}")
    if not denominator and not isinstance(state, Tensor):
        raise ValueError(f"initial_state must be one tensor S [N, H, K, V] without normalize, but came as {described(state)}")
    s, z = state if denominator else (state, None)
    shape("initial_state", tensor("initial_state", s, v), "[N, H, K, V]", full)
    dtype("initial_state", s, _compute_dtype(v.dtype))
    if denominator:
        z = tensor("initial_state[1] (z)", z, v)
        shape("initial_state[1] (z)", z, "[N, H, K]", full[:3])
        dtype("initial_state[1] (z)", z, _compute_dtype(v.dtype))
    return s, z


def _packed(cu: Tensor, q: Tensor, k: Tensor) -> None:
    if q.shape[1] != k.shape[1]:
        raise ValueError(f"q and k must have equally many tokens with cu_seqlens, but q has {q.shape[1]} tokens and k has {k.shape[1]}")
    packed_lengths(cu, k)


def packed_lengths(cu: Tensor, like: Tensor, name: str = "cu_seqlens") -> None:
    """Check ``cu_seqlens`` [N + 1], called ``name`` in errors, against a packed tensor [1, T, ...]."""
    tensor(name, cu, like)
    batch, tokens = like.shape[:2]
    if cu.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{name} must be torch.int32 or torch.int64, but came as {cu.dtype}")
    if cu.ndim != 1 or cu.shape[0] < 1:
        raise ValueError(f"{name} must have shape [N + 1], but came with {list(cu.shape)}")
    if batch != 1:
        raise ValueError(f"{name} packs the sequences into one row, so B must be 1, but is {batch}")
    if not values_visible(cu):
        return
    ends = cu.tolist()
    if ends[0] != 0 or ends[-1] != tokens or any(a > b for a, b in zip(ends[:-1], ends[1:], strict=True)):
        raise ValueError(f"{name} must rise from 0 to T = {tokens} and never fall, but came as {_short(ends)}")


def check_tokens(name: str, ids: object, count: int) -> None:
    """Raise ValueError unless ``ids`` are tokens [B, T], integers from 0 to ``count`` - 1."""
    if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.dtype not in (torch.int64, torch.int32):
        came = (
            f"{ids.dtype} {list(ids.shape)}"
            if isinstance(ids, Tensor) and not ids.is_nested
            else "None"
            if ids is None
            else type(ids).__name__
        )
        raise ValueError(f"{name} must be integers of shape [B, T], but came as {came}")
    if ids.numel() and values_visible(tensor(name, ids)):
        low, high = ids.aminmax()
        if low < 0 or high >= count:
            raise ValueError(f"{name} must be from 0 to {count - 1}, but hold {int(low if low < 0 else high)}")


def check_mask(name: str, mask: object, ids: Tensor) -> None:
    """Raise ValueError unless ``mask`` is bool [B, T] on the device of ``ids``."""
    if isinstance(mask, Tensor):
        tensor(name, mask)
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.shape != ids.shape or mask.device != ids.device:
        raise ValueError(f"{name} must be torch.bool of shape [B, T] = {list(ids.shape)} on {ids.device}, but came as {described(mask)}")


def attended(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None) -> None:
    """Check the arguments of softmax attention: q, k [B, T, H, K] and v [B, T, H, V] in one dtype, and ``lengths`` [B] of the rows."""
    for name, t in (("q", q), ("k", k), ("v", v)):
        dtype(name, tensor(name, t, None if t is q else q), *(DTYPES if t is q else (q.dtype,)))
    if q.ndim != 4 or not _same(k.shape, q.shape) or v.ndim != 4 or not _same(v.shape[:3], q.shape[:3]):
        came = [list(t.shape) for t in (q, k, v)]
        raise ValueError(f"q, k and v must be [B, T, H, K], [B, T, H, K] and [B, T, H, V], but came with {came}")
    if lengths is not None:
        row_lengths(lengths, q)


def row_lengths(lengths: Tensor, like: Tensor) -> None:
    """Check ``lengths`` [B], the numbers of real tokens of the rows, against a tensor [B, T, ...]."""
    shape("lengths", tensor("lengths", lengths, like), "[B]", (like.shape[0],))
    dtype("lengths", lengths, torch.int64, torch.int32)
    if lengths.numel() and values_visible(lengths) and not 0 <= int(lengths.amin()) <= int(lengths.amax()) <= like.shape[1]:
        raise ValueError(f"lengths must be from 0 to T = {like.shape[1]}, but came as {lengths.tolist()}")


def _short(values: list[int]) -> str:
    return str(values) if len(values) <= 8 else f"[{', '.join(map(str, values[:4]))}, ..., {values[-1]}]"
