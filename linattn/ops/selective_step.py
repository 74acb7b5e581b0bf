"""Decoding step of the selective scan (Mamba, Mamba-2), which updates its state in place."""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor

from linattn.ops import checks, dispatch, sharding, tracing
from linattn.ops.inputs import Backend
from linattn.ops.torch import selective_step as portable
from linattn.ops.torch.selective_step import Step


@sharding.refuses("decoding needs the state of the whole sequence in one process")
def selective_step_(  # noqa: PLR0913  the arguments of published implementations
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    *,
    z: Tensor | None = None,
    bias: Tensor | None = None,
    softplus: bool = False,
    limit: tuple[float, float] = (0.0, math.inf),
    backend: Backend = "auto",
) -> Tensor:
    """Update ``state`` by ``h ← exp(Δ A) ⊙ h + (Δ x) B`` and compute ``y = (h C + D x) ⊙ silu(z)``, with Δ from ``dt``.

    One kernel on a GPU and a CPU, for any strides: values shared by the channels of a head may be expanded tensors.

    Args:
        state: [B, D, N] or, in heads, [B, H, P, N], in float32 (float64 for float64).
        x: the token [B, D] or [B, H, P].
        dt: as x; Δ = ``dt + bias``, its softplus with ``softplus``, kept within ``limit``.
        A: at most 0, [D, N] or [H, P, N].
        B, C: [B, N], or one for each of G groups of heads, [B, G, N].
        D, bias: [D] or [H, P]; None: 0.
        z: as x; None: no gate.
        backend: ``"torch"`` (every device; ``"reference"`` is the same), ``"cpu"``, ``"triton"`` (kernels), or ``"auto"``: the kernels
            where they run the call, else torch. They have no gradients: where those are wanted torch's operations run.

    Returns:
        y as x, in its dtype. Sums, gates and time steps are float32, float64 where the state is.

    Raises:
        ValueError: naming the argument, what came and what was wanted.
    """
    call = Step(state, x, dt, bias, A, B, C, D, z, softplus, limit)
    _check(call)
    if tracing.wanted(*call.tensors) or tracing.traced(*call.tensors):
        backend = "torch"
    name = dispatch.choose(backend, _refusal, call.tensors)
    if name in ("cpu", "triton"):
        return cast(Tensor, _load(name).step_(call))
    with checks.no_autocast(state):
        return portable.step_(call)


def _load(name: str) -> ModuleType:
    if name == "cpu":
        from linattn.ops.cpu import selective_step as native

        return native
    from linattn.ops.triton import selective_step as kernels

    return kernels


def _refusal(name: str, asked: bool, tensors: tuple[Any, ...]) -> str | None:
    return None if name == "reference" else dispatch.refusal(name, asked, tensors[0], _load, tensors)


def _check(call: Step) -> None:
    """Raise ValueError unless shapes, devices and the state's dtype fit; a few comparisons where they do."""
    state, x, dt, bias, a, b, c, d, z = call[:9]
    full = state.shape
    if len(full) not in (3, 4):
        raise ValueError(f"state must have shape [B, D, N] or [B, H, P, N], but came with {list(full)}")
    token, channels, groups = full[:-1], full[1:-1], b.shape[1:-1]
    shared = (full[0], *groups, full[-1])
    if len(groups) != len(full) - 3 or (groups and (groups[0] == 0 or full[1] % groups[0])):
        raise ValueError(f"B must have shape [B, N] beside a state [B, D, N], [B, G, N] beside [B, H, P, N] with G dividing H, but came "
                         f"with {list(b.shape)} beside {list(full)}")  # fmt: skip
    each = (("x", x, token), ("dt", dt, token), ("A", a, full[1:]), ("B", b, shared), ("C", c, shared), ("D", d, channels))
    for name, t, wanted in (*each, ("bias", bias, channels), ("z", z, token)):
        if t is None:
            continue
        if t.shape != wanted:
            checks.shape(name, t, "as the state says", tuple(wanted))
        if t.device != state.device:
            checks.tensor(name, t, state)
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    if state.dtype != wide:
        checks.dtype("state", state, wide)


def _explained(**given: Any) -> dispatch.Explained:
    call = Step(*(given[name] for name in ("state", "x", "dt", "bias", "A", "B", "C", "D", "z")))
    _check(call)
    title = f"selective_step_ on {call.state.device}, {call.x.dtype}, state {list(call.state.shape)}"
    return dispatch.Explained(title, call.state.device, _refusal, (call.tensors,))


dispatch.explains(selective_step_, _explained)
