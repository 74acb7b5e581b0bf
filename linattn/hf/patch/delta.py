"""The delta rule with a decay, per head or per channel: Qwen3-Next, Qwen3.5, OLMo hybrid (Gated DeltaNet) and Kimi Linear (KDA)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from torch import Tensor

from linattn.hf.patch.call import Family, Replacement, current, shared, state_of, to_float32
from linattn.ops import linear_attention
from linattn.ops.linears import stepped
from linattn.ops.norms import unit_length
from linattn.ops.recurrent_step import recurrent_step_

FAMILIES = {
    "qwen3_next": Family(
        "qwen3_next", "Qwen3NextGatedDeltaNet", "Qwen3NextModel", norms=("Qwen3NextRMSNormGated",), ffns=("Qwen3NextMLP",)
    ),
    "qwen3_5": Family("qwen3_5", "Qwen3_5GatedDeltaNet", "Qwen3_5TextModel", norms=("Qwen3_5RMSNormGated",), ffns=("Qwen3_5MLP",)),
    "qwen3_5_text": Family("qwen3_5", "Qwen3_5GatedDeltaNet", "Qwen3_5TextModel", norms=("Qwen3_5RMSNormGated",), ffns=("Qwen3_5MLP",)),
    "qwen3_5_moe": Family(
        "qwen3_5_moe", "Qwen3_5MoeGatedDeltaNet", "Qwen3_5MoeTextModel", norms=("Qwen3_5MoeRMSNormGated",), ffns=("Qwen3_5MoeMLP",)
    ),
    "qwen3_5_moe_text": Family(
        "qwen3_5_moe", "Qwen3_5MoeGatedDeltaNet", "Qwen3_5MoeTextModel", norms=("Qwen3_5MoeRMSNormGated",), ffns=("Qwen3_5MoeMLP",)
    ),
    "olmo_hybrid": Family(
        "olmo_hybrid", "OlmoHybridGatedDeltaNet", "OlmoHybridModel", norms=("OlmoHybridRMSNorm", "OlmoHybridRMSNormGated"),
        ffns=("OlmoHybridMLP",),
    ),
    "kimi_linear": Family(
        "kimi_linear", "KimiLinearDeltaAttention", "KimiLinearModel", norms=("KimiLinearRMSNorm", "KimiLinearRMSNormGated"),
        ffns=("KimiLinearMLP",),
    ),
}  # fmt: skip
_RULES = {  # functions for many tokens, and for one token
    "kimi_linear": ("chunk_kimi_delta_attention", "recurrent_kimi_delta_attention"),
    "": ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"),
}


def replacements(module: ModuleType, family: str, run: Callable) -> Iterator[Replacement]:
    rule = _rule(run)
    for name in _RULES.get(family, _RULES[""]):
        yield module, name, rule
    if family == "kimi_linear":
        yield module.KimiLinearForgetGate, "forward", _forget_gate
    yield from shared(module, FAMILIES[family])


def _forget_gate(self: Any, hidden_states: Tensor) -> Tensor:
    """Compute KDA's decay [B, T, H, K].

    transformers computes log(1 + exp(x)) with an error of up to 6e-8: slow decays lose digits, the slowest become 0.
    """
    rates = -to_float32(self.A_log).exp().expand(-1, -1, -1, self.head_dim).flatten()  # [H * K]
    steps = (("add", to_float32(self.dt_bias)), ("softplus", None), ("mul", rates))
    return stepped(self.f_b_proj(self.f_a_proj(hidden_states)), steps).unflatten(-1, (-1, self.head_dim))


def _rule(run: Callable) -> Callable:
    def delta_rule(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        *,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        **_: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """query, key [B, T, Hk, K], value [B, T, H, V], g [B, T, H] or [B, T, H, K], beta [B, T, H], initial_state [B, H, K, V]."""
        call = current()
        if query.shape[1] == 1 and initial_state is not None and call.owns(initial_state, value):  # a single token is never padding
            unit = 1e-6 if use_qk_l2norm_in_kernel else None
            return run(recurrent_step_, initial_state, query, key, value, decay=g, beta=beta, unit=unit), initial_state
        # Keys of padding are 0, as the convolution has no bias, so only its decay would have an effect.
        if use_qk_l2norm_in_kernel:
            query, key = (unit_length(t, eps=1e-6, dtype=value.dtype) for t in (query, key))
        if initial_state is not None:
            initial_state = call.first(state_of(initial_state, value))
        o, state = run(
            linear_attention, query, key, value, decay=state_of(call.only_real(g), value), beta=beta,
            initial_state=initial_state, return_state=True, cu_seqlens=call.cu_seqlens,
        )  # fmt: skip
        return o, call.last(state) if output_final_state else None

    return delta_rule
