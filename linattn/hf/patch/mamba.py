"""The selective scan: Mamba, Falcon-Mamba and Jamba."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from linattn.hf.patch.call import Family, Replacement, absent, channels_last, current, in_place, passing, shared, state_of, wide
from linattn.ops import selective_scan

FAMILIES = {
    "mamba": Family("mamba", "MambaMixer", "MambaModel", head="MambaForCausalLM", lost=("packing",)),
    "falcon_mamba": Family("falcon_mamba", "FalconMambaMixer", "FalconMambaModel", head="FalconMambaForCausalLM", lost=("packing",)),
    "jamba": Family("jamba", "JambaMambaMixer", "JambaModel"),
}


def replacements(module: ModuleType, family: str, run: Callable) -> Iterator[Replacement]:
    yield module, "mamba_selective_scan", _scan(run)
    yield module, "mamba_selective_state_update", _step(run)
    yield module, "mamba_inner_fn", absent
    yield from shared(module, FAMILIES[family])
    if family == "jamba":
        yield module.JambaMambaDecoderLayer, "forward", passing(module.JambaMambaDecoderLayer.forward)


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
        """hidden_states, dt, z [B, D, T], A [D, N], B, C [B, N, T], D, delta_bias [D]; goes on from the state in the cache."""
        call = current()
        x, B, C = (t.transpose(1, 2) for t in (hidden_states, B, C))
        dt = call.only_real(_time_step(channels_last(dt), delta_bias, delta_softplus))
        before = None if call.layer is None else call.layer.recurrent_states[0]
        before = None if before is None else call.first(state_of(before, x))
        y, state = run(
            selective_scan, x, dt, A.to(dt.dtype), B, C, None if D is None else D.to(dt.dtype),
            initial_state=before, return_state=True, cu_seqlens=call.cu_seqlens,
        )  # fmt: skip
        y = y.transpose(1, 2)
        y = y if z is None else y * F.silu(z)
        return (y, call.last(state)) if return_last_state else y

    return scan


def _step(run: Callable) -> Callable:
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
        """state [B, D, N], brought up to date; hidden_states, dt, z [B, D], A [D, N], B, C [B, N], D, dt_bias [D]."""
        return in_place(run, state, hidden_states, dt, A, B, C, D, z=z, bias=dt_bias, softplus=dt_softplus)

    return step


def _time_step(dt: Tensor, bias: Tensor | None, softplus: bool) -> Tensor:
    """float32: rounded time steps decay wrongly over long sequences."""
    dt = wide(dt)
    dt = dt if bias is None else dt + bias.to(dt.dtype)
    return F.softplus(dt) if softplus else dt
