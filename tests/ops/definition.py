"""Independent definition of the recurrence with every product spelled out: [B, T, H, K, V] everywhere.

Each argument is first repeated to the full shape, so that the gradient of one of its copies is one summand of the argument's
gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tests.ops.cases import Call, cotangent, remembered

AXES = {"q": "btkc", "k": "btkc", "v": "bthd", "beta": "bth", "read": "bthc", "write": "bthc", "bonus": "hc"}
DECAYS = {1: "h", 2: "hc", 3: "bth", 4: "bthc"}


def full(name: str, t: Tensor, shape: tuple[int, int, int, int, int]) -> Tensor:
    """``t`` repeated to [B, T, H, K, V]; q and k are shared by neighbouring heads."""
    axes = DECAYS[t.ndim] if name == "decay" else AXES[name]
    if "k" in axes:
        t, axes = t.repeat_interleave(shape[2] // t.shape[2], 2), axes.replace("k", "h")
    index = [slice(None) if axis in axes else None for axis in "bthcd"]
    return t[tuple(index)].expand(shape)


def repeated(call: Call) -> dict[str, Tensor]:
    """Every argument but the states at [B, T, H, K, V]; with ``normalize`` z is a column more of S, and v has a 1 there."""
    t = dict(call.tensors)
    s, z = t.pop("S", None), t.pop("z", None)
    (B, T, H, V), K = t["v"].shape, t["k"].shape[3]
    if call.options.get("normalize", False) is not False:
        t["v"] = torch.cat([t["v"], torch.ones_like(t["v"][..., :1])], -1)
        s, V = None if s is None else torch.cat([s, z[..., None]], -1), V + 1
    out = {name: full(name, x, (B, T, H, K, V)) for name, x in t.items()}
    ends = call.options.get("cu_seqlens")
    rows = B if ends is None else len(ends) - 1
    out["S"] = out["v"].new_zeros(rows, H, K, V) if s is None else s
    return out


def run(call: Call, x: dict[str, Tensor], stored: Callable[[Tensor], Tensor] = lambda s: s) -> tuple[dict[str, Tensor], list[Tensor]]:
    """The results by name from the repeated arguments, and every state on the way, each of them ``stored`` first."""
    ends = call.options.get("cu_seqlens")
    spans = [(0, x["v"].shape[1])] if ends is None else list(zip(ends.tolist()[:-1], ends.tolist()[1:], strict=True))
    o, last, states = [x["v"][:, :0, :, 0]], [], []
    tokens = {name: y.unbind(1) for name, y in x.items() if name not in ("S", "bonus")}  # the gradient of y[:, t] is as large as y's
    for n, (start, stop) in enumerate(spans):
        s = stored(x["S"] if ends is None else x["S"][n : n + 1])
        for t in range(start, stop):
            read, s = token({name: y[t] for name, y in tokens.items()}, x.get("bonus"), s)
            s = stored(s)
            o.append((read * (call.options.get("scale") or x["v"].shape[3] ** -0.5))[:, None])
            states.append(s)
        last.append(s)
    return _named(call, torch.cat(o, 1), torch.cat(last)), states


def token(x: dict[str, Tensor], bonus: Tensor | None, s: Tensor) -> tuple[Tensor, Tensor]:
    """One token [B, H, K, V]: what is read [B, H, V] before the scale, and the next state."""
    zero = torch.zeros_like(s)
    faded = x["decay"].exp() * s if "decay" in x else s
    value = x["v"] if "beta" not in x else x["beta"] * (x["v"] - (x["k"] * faded).sum(-2, keepdim=True))
    erased = x["write"] * (x["read"] * s).sum(-2, keepdim=True) if "read" in x else zero
    after = faded + erased + x["k"] * value
    seen = after if bonus is None else s + bonus[:, 0] * x["k"] * x["v"]
    return (x["q"] * seen).sum(-2), after


def _named(call: Call, o: Tensor, s: Tensor) -> dict[str, Tensor]:
    mode = call.options.get("normalize", False)
    if mode is False:
        return {"o": o, "S": s}
    o, denominator, states = o[..., :-1], o[..., -1], {"S": s[..., :-1], "z": s[..., -1]}
    if mode == "return":
        return {"o": o, "denominator": denominator, **states}
    return {"o": o / (denominator + (1e-6 if mode is True else mode))[..., None], **states}


def results(call: Call) -> dict[str, Tensor]:
    """Expected results of the op."""
    return run(call, repeated(call))[0]


@remembered
def largest_state(call: Call) -> float:
    """max ‖S_t‖ over rows, heads and time."""
    return max((s.flatten(2).norm(dim=-1).max().item() for s in run(call, repeated(call))[1]), default=0.0)


@remembered
def deviations(call: Call, dtype: torch.dtype, outputs: tuple[str, ...] | None = None, samples: int = 8) -> dict[str, Tensor]:
    """Rounding errors of each result, by name, and gradient, as "gradient of NAME": the standard deviation of every number.

    Every factor of every product has a random rounding error of ``dtype``; every state and its gradient one of the states' dtype, at least
    float32. The factor of a decay, a state and its gradient also err by the smallest normal number, since subnormals may be 0. So each
    term of a sum contributes by its own size, even if the sum is 0, as do 1 and β|k|² in the factor 1 - β|k|² of a state.
    """
    wide = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32)
    unit, least = torch.finfo(dtype).eps / 2, wide.tiny
    random = torch.Generator().manual_seed(0)
    exact = _results_and_gradients(call, repeated(call), outputs)
    squares = {name: torch.zeros_like(t) for name, t in exact.items()}
    for _ in range(samples):
        moved = {name: _moved(name, t, unit, least, random) for name, t in repeated(call).items()}
        for name, t in _results_and_gradients(call, moved, outputs, partial(_Stored.apply, (wide.eps / 2, least), random)).items():
            squares[name] += (t - exact[name]).square() / samples
    return {name: t.sqrt() for name, t in squares.items()}


def _signs(like: Tensor, random: torch.Generator) -> Tensor:
    return torch.randint(0, 2, like.shape, generator=random).to(like) * 2 - 1


def _off(t: Tensor, unit: float, least: float, random: torch.Generator) -> Tensor:
    return t + (unit * t.abs() + least) * _signs(t, random)


def _moved(name: str, t: Tensor, unit: float, least: float, random: torch.Generator) -> Tensor:
    if name != "decay":
        return t * (1 + unit * _signs(t, random))
    return torch.where(t.isneginf(), t, _off(t.exp(), unit, least, random).clamp(min=0).log())


class _Stored(torch.autograd.Function):
    """A state and its gradient, both with errors ``size``: relative and absolute."""

    @staticmethod
    def forward(ctx: Any, size: tuple[float, float], random: torch.Generator, s: Tensor) -> Tensor:
        ctx.how = size, random
        return _off(s, *size, random)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, Tensor]:
        size, random = ctx.how
        return None, None, _off(grad, *size, random)


def _results_and_gradients(
    call: Call, x: dict[str, Tensor], outputs: tuple[str, ...] | None, stored: Callable[[Tensor], Tensor] = lambda s: s
) -> dict[str, Tensor]:
    """The results from repeated arguments, and the gradients of the arguments, each the sum over its copies."""
    leaves = {name: t.detach().contiguous().clone().requires_grad_() for name, t in x.items()}
    out, _ = run(call, leaves, stored)
    loss = sum((y * cotangent(y)).sum() for name, y in out.items() if outputs is None or name in outputs)
    grads = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True), strict=True))
    if "z" in call.tensors:
        grads["S"], grads["z"] = grads["S"][..., :-1], grads["S"][..., -1]
    if call.options.get("normalize", False) is not False:
        grads["v"] = grads["v"][..., :-1]
    of = {f"gradient of {name}": _gathered(name, grads[name], t) for name, t in call.tensors.items()}
    return {**{name: y.detach() for name, y in out.items()}, **of}


def _gathered(name: str, grad: Tensor, like: Tensor) -> Tensor:
    """The sum over the copies of each element of ``like``."""
    if name in ("S", "z"):
        return grad
    leaf = torch.zeros_like(like).requires_grad_()
    (total,) = torch.autograd.grad(full(name, leaf, tuple(grad.shape)), leaf, grad)
    return total
