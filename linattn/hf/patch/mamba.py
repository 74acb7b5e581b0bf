"""The selective scan: Mamba, Falcon-Mamba and Jamba."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import wraps
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn.hf.patch.call import Family, Replacement, absent, current, in_place, passing, shared, state_dtype, state_of, to_float32
from linattn.ops import selective_scan

FAMILIES = {
    "mamba": Family("mamba", "MambaMixer", "MambaModel", head="MambaForCausalLM", norms=("MambaRMSNorm",), lost=("packing",)),
    "falcon_mamba": Family(
        "falcon_mamba",
        "FalconMambaMixer",
        "FalconMambaModel",
        head="FalconMambaForCausalLM",
        norms=("FalconMambaRMSNorm",),
        lost=("packing",),
    ),
    "jamba": Family("jamba", "JambaMambaMixer", "JambaModel", norms=("JambaRMSNorm",), ffns=("JambaMLP",)),
}


def replacements(module: ModuleType, family: str, run: Callable) -> Iterator[Replacement]:
    yield module, "mamba_selective_scan", _scan(run)
    yield module, "mamba_selective_state_update", step_of(run)
    yield module, "mamba_inner_fn", absent
    yield from shared(module, FAMILIES[family], _frozen)
    if family == "jamba":
        yield module.JambaMambaDecoderLayer, "forward", passing(module.JambaMambaDecoderLayer.forward)


class _Linear(NamedTuple):
    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class _Frozen:
    """Mixer whose projection to time steps is detached.

    In a batched product with the weight on the left torch chooses another layout, and copies, if the weight requires gradients, even
    when none are recorded.
    """

    def __init__(self, mixer: nn.Module) -> None:
        self.mixer = mixer
        self.dt_proj = _Linear(mixer.dt_proj.weight.detach(), mixer.dt_proj.bias)  # type: ignore[union-attr,arg-type,operator]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.mixer, name)


def _frozen(original: Callable) -> Callable:
    @wraps(original)
    def forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        plain = type(self.dt_proj) is nn.Linear and not hasattr(self.dt_proj, "_hf_hook")  # a hook may have to load the weight first
        if plain and hidden_states.shape[1] > 1 and not torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self = _Frozen(self)
        return original(self, hidden_states, *args, **kwargs)

    return forward


def _scan(run: Callable) -> Callable:
    def scan(
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None = None,
        z: Tensor | None = None,
        delta_bias: Tensor | None = None,
        delta_softplus: bool = False,
        return_last_state: bool = False,
        **_: Any,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """hidden_states, dt, z [B, D, T], A [D, N], B, C [B, N, T], D, delta_bias [D]; continues from the state in the cache."""
        call = current()
        x, B, C = (t.transpose(1, 2) for t in (hidden_states, B, C))
        dt, z = dt.transpose(1, 2), None if z is None else z.transpose(1, 2)
        if call.real is not None:  # a time step of 0 leaves the state unchanged
            dt, delta_bias, delta_softplus = call.only_real(time_step(dt, delta_bias, delta_softplus)), None, False
        A = A.to(state_dtype(x))
        D, bias = (None if t is None else t.to(state_dtype(x)) for t in (D, delta_bias))
        before = None if call.layer is None else call.layer.recurrent_states[0]
        before = None if before is None else call.first(state_of(before, x))
        y, state = run(
            selective_scan, x, dt, A, B, C, D, bias=bias, softplus=delta_softplus, z=z,
            initial_state=before, return_state=True, cu_seqlens=call.cu_seqlens,
        )  # fmt: skip
        y = y.transpose(1, 2)
        return (y, call.last(state)) if return_last_state else y

    return scan


def step_of(run: Callable, limit: Callable[[], tuple[float, float]] = lambda: (0.0, math.inf)) -> Callable:
    """Make the replacement of a step, with time steps kept within ``limit()``; Mamba-2's is the same in heads."""

    def step(
        state: Tensor,
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None = None,
        z: Tensor | None = None,
        dt_bias: Tensor | None = None,
        dt_softplus: bool = False,
        **_: Any,
    ) -> Tensor:
        """Update state [B, D, N]; hidden_states, dt, z [B, D], A [D, N], B, C [B, N], D, dt_bias [D].

        In heads [B, H, P, N], [B, H, P], [H, P, N], [B, G, N] and [H, P]: tensors independent of P or N are expanded.
        """
        return in_place(run, state, hidden_states, dt, A, B, C, D, z=z, bias=dt_bias, softplus=dt_softplus, limit=limit())

    return step


def time_step(dt: Tensor, bias: Tensor | None, softplus: bool) -> Tensor:
    """Time step in float32, because rounding errors accumulate over long sequences."""
    dt = to_float32(dt)
    dt = dt if bias is None else dt + bias.to(dt.dtype)
    return F.softplus(dt) if softplus else dt
