"""The recurrence a second time, written from the equations with every product spelled out: [B, T, H, K, V] everywhere.

It is slow and large on purpose. Each argument is first repeated to the full shape, so that the gradient of one of its copies
is one summand of the gradient of the argument.
"""

from __future__ import annotations

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


def run(call: Call, x: dict[str, Tensor]) -> tuple[dict[str, Tensor], list[Tensor]]:
    """The results by name from the repeated arguments, and every state on the way."""
    ends = call.options.get("cu_seqlens")
    spans = [(0, x["v"].shape[1])] if ends is None else list(zip(ends.tolist()[:-1], ends.tolist()[1:], strict=True))
    o, last, states = [x["v"][:, :0, :, 0]], [], []
    tokens = {name: y.unbind(1) for name, y in x.items() if name not in ("S", "bonus")}  # the gradient of y[:, t] is as large as y's
    for n, (start, stop) in enumerate(spans):
        s = x["S"] if ends is None else x["S"][n : n + 1]
        for t in range(start, stop):
            read, s = token({name: y[t] for name, y in tokens.items()}, x.get("bonus"), s)
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
    """What the op has to return."""
    return run(call, repeated(call))[0]


@remembered
def largest_state(call: Call) -> float:
    """max ‖S_t‖ over rows, heads and time."""
    return max((s.flatten(2).norm(dim=-1).max().item() for s in run(call, repeated(call))[1]), default=0.0)


@remembered
def summands(call: Call) -> dict[str, float]:
    """For each argument the norm of the sum of the sizes of what its gradient is a sum of."""
    leaves = {name: t.detach().contiguous().clone().requires_grad_() for name, t in repeated(call).items()}
    out, _ = run(call, leaves)
    loss = sum((y * cotangent(y)).sum() for y in out.values())
    grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
    sizes = {name: g.abs() for name, g in zip(leaves, grads, strict=True)}
    if "z" in call.tensors:
        sizes["S"], sizes["z"] = sizes["S"][..., :-1], sizes["S"][..., -1]
    if call.options.get("normalize", False) is not False:
        sizes["v"] = sizes["v"][..., :-1]
    return {name: _gathered(name, sizes[name], t).norm().item() for name, t in call.tensors.items()}


def _gathered(name: str, size: Tensor, like: Tensor) -> Tensor:
    """The sum over the copies of each element of ``like``."""
    if name in ("S", "z"):
        return size
    leaf = torch.zeros_like(like).requires_grad_()
    (total,) = torch.autograd.grad(full(name, leaf, tuple(size.shape)), leaf, size)
    return total
