"""Invalid values: other types, shapes, dtypes and devices, NaN, infinities, empty, too large, negative."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

Draw = Callable[[st.SearchStrategy], Any]

DTYPES = (
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.int64, torch.int32, torch.uint8, torch.bool,
    torch.float8_e4m3fn,
)  # fmt: skip
JUNK: tuple[Any, ...] = (
    None, True, 0, -1, 3, 10**12, 10**30, 0.5, math.nan, math.inf, -math.inf, "", "gla", "no such name", b"x", (), [], [1, 2], [None],
    {}, {"a": 1}, object(), torch.float32, np.float32(1.0), np.ones(3), 1j, len,
)  # fmt: skip
NUMBERS: tuple[Any, ...] = (
    0,
    -1,
    1,
    2,
    3,
    7,
    33,
    True,
    None,
    0.0,
    -0.5,
    0.5,
    1.5,
    math.nan,
    math.inf,
    -math.inf,
    1000,
    10**12,
    10**30,
    "4",
    [2],
)
WORDS: tuple[Any, ...] = (
    "",
    "gla",
    "softmax",
    "auto",
    "torch",
    "reference",
    "no such name",
    "gla*0",
    "gla*",
    "a/../b",
    "\0",
    "💧",
    None,
    3,
    [],
    b"x",
)


def tensor(draw: Draw, *shape: int, dtype: torch.dtype = torch.float32, low: float = -1.0, high: float = 1.0) -> Tensor:
    """A valid tensor of numbers from ``low`` to ``high``."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 7)))
    return (torch.rand(shape, generator=generator) * (high - low) + low).to(dtype)


def integers(draw: Draw, low: int, high: int, *shape: int) -> Tensor:
    """A valid tensor of integers from ``low`` to ``high`` - 1."""
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 7))))


def mutated(draw: Draw, value: Any) -> Any:
    """A variation of ``value`` that may be invalid, or an unrelated value."""
    if draw(st.integers(0, 5)) == 0:
        return draw(st.sampled_from(JUNK))
    if isinstance(value, Tensor):
        plain = value.device.type == "cpu" and value.layout == torch.strided and not value.is_nested and not value.requires_grad
        try:
            return _tensor(draw, value) if plain else draw(st.sampled_from(JUNK))
        except (RuntimeError, NotImplementedError):  # torch itself makes no such tensor
            return value
    if isinstance(value, bool) or value is None:
        return draw(st.sampled_from(JUNK))
    if isinstance(value, int | float):
        return draw(st.sampled_from(NUMBERS))
    if isinstance(value, str):
        return draw(st.sampled_from(WORDS))
    if isinstance(value, list | tuple) and value:
        return _sequence(draw, value)
    if isinstance(value, dict) and value:
        key = draw(st.sampled_from(sorted(value, key=repr)))
        return {**value, key: mutated(draw, value[key])}
    return draw(st.sampled_from(JUNK))


def _sequence(draw: Draw, value: list | tuple) -> Any:
    change = draw(st.sampled_from(["one", "shorter", "longer", "empty"]))
    items = list(value)
    if change == "one":
        place = draw(st.integers(0, len(items) - 1))
        items[place] = mutated(draw, items[place])
    items = {"shorter": items[:-1], "longer": [*items, items[-1]], "empty": []}.get(change, items)
    return type(value)(items)


def _tensor(draw: Draw, t: Tensor) -> Any:
    kind = draw(st.sampled_from(["shape", "shape", "dtype", "values", "values", "layout", "device", "python", "gradient"]))
    if kind == "shape":
        return _shape(draw, t)
    if kind == "dtype":
        return t.to(draw(st.sampled_from(DTYPES)))
    if kind == "values":
        return _values(draw, t)
    if kind == "layout":
        return _layout(draw, t)
    if kind == "device":
        return t.to("meta")
    if kind == "gradient":
        return t.detach().clone().requires_grad_() if t.is_floating_point() or t.is_complex() else t
    return t.tolist() if draw(st.booleans()) else t.float().resolve_neg().numpy()


def _shape(draw: Draw, t: Tensor) -> Tensor:
    change = draw(st.sampled_from(["more", "fewer", "size", "empty", "scalar", "expanded"]))
    if change == "more":
        return t[None]
    if change == "scalar" or not t.ndim:
        return t.new_zeros(())
    if change == "fewer":
        return t[0] if t.shape[0] else t.new_zeros(t.shape[1:])
    dim = draw(st.integers(0, t.ndim - 1))
    size = 0 if change == "empty" else draw(st.integers(1, 5))
    shape = [*t.shape[:dim], size, *t.shape[dim + 1 :]]
    return t.new_zeros([]).expand(shape) if change == "expanded" else t.new_ones(shape) * (0 if t.dtype == torch.bool else -1)


def _values(draw: Draw, t: Tensor) -> Tensor:
    number = draw(st.sampled_from([math.nan, math.inf, -math.inf, 1e38, -1e38, 1e-45, 0.0, -1.0, 1.0]))
    if not (t.is_floating_point() or t.is_complex()):
        info = torch.iinfo(t.dtype) if t.dtype != torch.bool else None
        whole = draw(st.sampled_from([0, -1, 5, 10**9, info.max, info.min])) if info else draw(st.integers(0, 1))
        t = t.clone()
        if t.numel():
            t.view(-1)[draw(st.integers(0, t.numel() - 1))] = torch.tensor(whole).to(t.dtype)
        return t
    if t.dtype == torch.float8_e4m3fn:  # cannot represent most of them
        return t
    if draw(st.booleans()) or not t.numel():
        return torch.tensor(number, dtype=torch.float64).to(t.dtype).expand(t.shape).clone()
    t = t.clone()
    t.view(-1)[draw(st.integers(0, t.numel() - 1))] = torch.tensor(number, dtype=torch.float64).to(t.dtype)
    return t


def _layout(draw: Draw, t: Tensor) -> Tensor:
    change = draw(st.sampled_from(["sparse", "transposed", "strided", "negative", "nested"]))
    if change == "sparse":
        return t.to_sparse() if t.ndim else t
    if change == "nested":
        return torch.nested.as_nested_tensor([t, t], layout=torch.jagged) if t.ndim else t
    if change == "transposed":
        return t.transpose(0, -1) if t.ndim else t
    if change == "negative":
        return torch.complex(torch.zeros_like(t), -t).conj().imag if t.dtype == torch.float32 else t
    return t.repeat_interleave(2, -1)[..., ::2] if t.ndim else t
