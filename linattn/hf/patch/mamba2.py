"""A decay per head from the token, shared keys and queries: Mamba-2, Bamba, Zamba2, Nemotron-H and Granite hybrid."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from torch import Tensor

from linattn.hf.patch.call import Call, Family, Replacement, absent, current, shared, state_of
from linattn.hf.patch.mamba import step_of, time_step
from linattn.ops import linear_attention

FAMILIES = {
    "mamba2": Family("mamba2", "Mamba2Mixer", "Mamba2Model", head="Mamba2ForCausalLM", norms=("Mamba2RMSNorm",)),
    "bamba": Family("bamba", "BambaMixer", "BambaModel", norms=("BambaRMSNorm",), ffns=("BambaMLP",)),
    "zamba2": Family("zamba2", "Zamba2MambaMixer", "Zamba2Model", norms=("Zamba2RMSNorm",)),
    "nemotron_h": Family("nemotron_h", "NemotronHMamba2Mixer", "NemotronHModel", norms=("NemotronHRMSNorm",)),
    "granitemoehybrid": Family(
        "granitemoehybrid", "GraniteMoeHybridMambaLayer", "GraniteMoeHybridModel", norms=("GraniteMoeHybridRMSNorm",)
    ),
}


def replacements(module: ModuleType, family: str, run: Callable) -> Iterator[Replacement]:
    yield module, "mamba2_chunk_scan", _scan(run)
    yield module, "mamba2_selective_state_update", step_of(run, lambda: current().mixer.time_step_limit)  # the limits of the scan
    yield module, "mamba2_split_conv1d_scan_combined", absent
    yield from shared(module, FAMILIES[family])


def _scan(run: Callable) -> Callable:
    def scan(  # noqa: PLR0913  the arguments of transformers' function
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        chunk_size: int | None = None,  # noqa: ARG001  linattn chooses its own chunks
        D: Tensor | None = None,
        dt_bias: Tensor | None = None,
        initial_states: Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        return_final_states: bool = False,
        **_: Any,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """hidden_states [B, T, H, P], dt [B, T, H], A, D, dt_bias [H], B, C [B, T, G, N], initial_states [B, H, P, N]."""
        call = current()
        dt = time_step(dt, dt_bias, dt_softplus).clamp(*dt_limit)
        y, state = _recurrence(run, hidden_states, dt, A, B, C, D, initial_states, call)
        return (y, call.last(state)) if return_final_states else y

    return scan


def _recurrence(
    run: Callable, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, initial: Tensor | None, call: Call
) -> tuple[Tensor, Tensor]:
    """``S_t = e^{Δ A} S_{t-1} + Bᵀ Δ x`` and ``y = C S + D x``, [B, T, H, P], and the states [rows, H, P, N]."""
    dt = call.only_real(dt)
    if initial is not None:
        initial = call.first(state_of(initial.transpose(-1, -2), x).contiguous())
    y, state = run(
        linear_attention, C.to(x.dtype), B.to(x.dtype), (x * dt[..., None]).to(x.dtype), decay=dt * A.to(dt.dtype), scale=1.0,
        initial_state=initial, return_state=True, cu_seqlens=call.cu_seqlens,
    )  # fmt: skip
    y = y if D is None else (y + D[:, None] * x).to(x.dtype)
    return y, state.transpose(-1, -2)
