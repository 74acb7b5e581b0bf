"""fla's linear attentions as calls of our ops: for each name of ``fla.ops`` the function that reads its arguments and runs ours.

fla's gates are natural logarithms and its default scale is K ** -0.5, as in linattn. Shapes are [B, T, H, ...]; states [N, H, K, V], or
[N, H, V, K] where ``state_v_first``. With ``reverse`` a sequence is read from its end.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from linattn.hf.fla.given import Given, Refused
from linattn.ops.inputs import Backend
from linattn.ops.linear_attention import linear_attention
from linattn.ops.norms import unit_length
from linattn.ops.scan import diagonal_scan

Rule = Callable[[Given], dict[str, Any]]  # arguments of linear_attention besides q, k and v; may replace v too
Served = Callable[[Given, Backend], tuple[Any, ...]]  # arguments and a backend: what fla's function returns
EPS = 1e-10  # of fla's normaliser


def attention(rule: Rule, queries: str = "q") -> Served:
    """Build the call of a family: ``rule`` reads its own arguments, this function the common ones."""

    def run(given: Given, backend: Backend) -> tuple[Any, ...]:
        q, k, v = given(queries), given("k"), given("v")
        if given("use_qk_l2norm_in_kernel", False):
            q, k = (unit_length(t, eps=1e-6, dtype=t.dtype) for t in (q, k))
        options = {"v": v, **rule(given), "scale": given("scale"), "cu_seqlens": given("cu_seqlens"), "backend": backend}
        keep, reverse = bool(given("output_final_state", False)), bool(given("reverse", False))
        transposed = bool(given("state_v_first", False)) or _deprecated(given)
        state = given("initial_state")
        given.all_read()
        tensors = _one_dtype({"q": q, "k": k, **options})
        if state is not None:
            state = _to_float32(state.transpose(-1, -2) if transposed else state, tensors["q"])
        if reverse:
            tensors, state = _reversed(tensors), _in_reverse(state, tensors["cu_seqlens"])
        o, final = linear_attention(**tensors, initial_state=state, return_state=True)
        if reverse:
            o, final = o.flip(1), _in_reverse(final, tensors["cu_seqlens"])
        return o.to(v.dtype), (final.transpose(-1, -2).contiguous() if transposed else final) if keep else None

    return run


def _deprecated(given: Given) -> bool:
    transposed = bool(given("transpose_state_layout", False))
    if transposed:
        warnings.warn("transpose_state_layout is deprecated in fla: use state_v_first", DeprecationWarning, stacklevel=5)
    return transposed


def normalized(given: Given, backend: Backend) -> tuple[Any, ...]:
    """Linear attention with fla's pair of states: (S, z) with z [N, 1, H, K]. ``normalize=False`` is the plain recurrence."""
    if not given("normalize", False):
        return attention(lambda _: {})(given, backend)
    q, k, v = given("q"), given("k"), given("v")
    state, keep = given("initial_state"), bool(given("output_final_state", False))
    options = {"scale": given("scale"), "cu_seqlens": given("cu_seqlens"), "backend": backend}
    if given("reverse", False):
        raise Refused("reverse cannot be combined with a normaliser")
    given.all_read()
    tensors = _one_dtype({"q": q, "k": k, "v": v, **options})
    if state is not None:
        s, z = state if isinstance(state, tuple) else (state, None)
        if s is None:
            raise Refused("initial_state has z but not S")
        s = _to_float32(s, tensors["q"])
        state = (s, s.new_zeros(s.shape[:-1]) if z is None else z.squeeze(1).to(s.dtype))
    o, (s, z) = linear_attention(**tensors, normalize=EPS, initial_state=state, return_state=True)
    return o.to(v.dtype), (s if keep else None, z[:, None].to(k.dtype))


def scan(given: Given, backend: Backend) -> tuple[Any, ...]:
    """``h_t = exp(g_t) h_{t-1} + x_t`` (HGRN), [B, T, D]."""
    x, decay, state = given("x"), given("g"), given("initial_state")
    keep, cu_seqlens = bool(given("output_final_state", False)), given("cu_seqlens")
    given.all_read()
    state = None if state is None else _to_float32(state, x)
    h, final = diagonal_scan(_to_float32(decay, x), x, initial_state=state, cu_seqlens=cu_seqlens, return_state=True, backend=backend)
    return h, final if keep else None


def _plain(given: Given) -> dict[str, Any]:
    """Decay per head: of each token, or constant."""
    g, constant = given("g"), given("g_gamma")
    if g is not None and constant is not None:
        return {"decay": g + constant}
    return {"decay": g if g is not None else constant}


def _retention(given: Given) -> dict[str, Any]:
    q = given("q")
    return {"decay": torch.log1p(-torch.exp2(-5.0 - torch.arange(q.shape[2], dtype=torch.float32, device=q.device)))}


def _lightning(given: Given) -> dict[str, Any]:
    q, layer, layers = given("q"), given("layer_idx"), given("num_layers")
    heads = q.shape[2]
    return {"decay": -8 / heads * (1 - layer / layers) * torch.arange(heads, dtype=torch.float32, device=q.device)}


def _channels(given: Given) -> dict[str, Any]:
    """Decay per channel of the keys: ``g`` of GLA in chunks, ``gk`` of its steps."""
    g, gk = given("g"), given("gk")
    return {"decay": g if g is not None else gk}


def _beta(given: Given, like: Tensor) -> Tensor:
    beta = given("beta")
    if beta is None:
        return like.new_ones(like.shape[:3])
    if beta.ndim == 4:
        raise Refused("beta has a value for each channel of the values")
    sigmoid, doubled = bool(given("use_beta_sigmoid_in_kernel", False)), bool(given("allow_neg_eigval", False))
    return beta.sigmoid() * (2 if doubled else 1) if sigmoid else beta


def _delta(given: Given) -> dict[str, Any]:
    return {"beta": _beta(given, given("v"))}


def _gated_delta(given: Given) -> dict[str, Any]:
    """Decays per head (``g``), per channel (``gk``) or both, computed from a raw gate if ``use_gate_in_kernel``."""
    g, gk, a, bias = given("g"), given("gk"), given("A_log"), given("dt_bias")
    if given("use_gate_in_kernel", False):
        if g is None or a is None:
            raise Refused("use_gate_in_kernel needs g and A_log")
        g = -a.float().exp() * F.softplus(g.float() if bias is None else g.float() + bias)
    both = g is not None and gk is not None
    return {"decay": gk + g[..., None] if both else g if gk is None else gk, "beta": _beta(given, given("v"))}


def _kda(given: Given) -> dict[str, Any]:
    g, a, bias, low = given("g"), given("A_log"), given("dt_bias"), given("lower_bound")
    if given("use_gate_in_kernel", False):
        raw = g.float() if bias is None else g.float() + bias.view(g.shape[-2:])
        rate = torch.ones((), device=g.device) if a is None else a.float().view(-1, 1).exp()
        if a is None and low is None:
            raise Refused("use_gate_in_kernel needs A_log or lower_bound")
        g = -rate * F.softplus(raw) if low is None else low * torch.sigmoid(rate * raw)
    return {"decay": g, "beta": _beta(given, given("v"))}


def _erase(decay: str | None) -> Rule:
    return lambda given: {"decay": given(decay) if decay else None, "erase": (given("a"), given("b"))}


def _comba(given: Given) -> dict[str, Any]:
    """``S_t = α S_{t-1} + β k (v - pᵀ S_{t-1})ᵀ``: fla's kernels read the state before its decay, unlike its token-by-token reference."""
    k, p, v = given("k"), given("p"), given("v")
    if given("use_qk_l2norm_in_kernel", False):
        k, p = (unit_length(t, eps=1e-6, dtype=t.dtype) for t in (k, p))
    beta = _beta(given, v).to(k.dtype)[..., None]
    return {"decay": given("g"), "erase": (p, -beta * k), "v": beta * v}


_GLA, _DELTA, _SIMPLE, _RETENTION = attention(_channels), attention(_delta), attention(_plain), attention(_retention)
_GATED, _KDA, _COMBA, _LIGHTNING = attention(_gated_delta), attention(_kda), attention(_comba), attention(_lightning)
_DPLR, _IPLR, _RWKV7 = attention(_erase("gk")), attention(_erase(None)), attention(_erase("w"), "r")
_RWKV6 = attention(lambda given: {"decay": given("w"), "bonus": given("u")}, "r")

SERVED: dict[str, Served] = {
    **dict.fromkeys(("chunk_linear_attn", "fused_chunk_linear_attn", "fused_recurrent_linear_attn"), normalized),
    **dict.fromkeys(("chunk_retention", "fused_chunk_retention", "fused_recurrent_retention", "parallel_retention"), _RETENTION),
    **dict.fromkeys(("chunk_lightning_attn", "fused_recurrent_lightning_attn"), _LIGHTNING),
    **dict.fromkeys(("chunk_simple_gla", "fused_chunk_simple_gla", "fused_recurrent_simple_gla", "parallel_simple_gla"), _SIMPLE),
    **dict.fromkeys(("chunk_gla", "fused_chunk_gla", "fused_recurrent_gla"), _GLA),
    **dict.fromkeys(("chunk_rwkv6", "fused_recurrent_rwkv6"), _RWKV6),
    **dict.fromkeys(("chunk_delta_rule", "fused_chunk_delta_rule", "fused_recurrent_delta_rule"), _DELTA),
    **dict.fromkeys(("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"), _GATED),
    **dict.fromkeys(("chunk_kda", "fused_recurrent_kda"), _KDA),
    **dict.fromkeys(("chunk_comba", "fused_recurrent_comba"), _COMBA),
    **dict.fromkeys(("chunk_iplr_delta_rule", "fused_recurrent_iplr_delta_rule"), _IPLR),
    **dict.fromkeys(("chunk_dplr_delta_rule", "fused_recurrent_dplr_delta_rule"), _DPLR),
    **dict.fromkeys(("chunk_rwkv7", "fused_recurrent_rwkv7"), _RWKV7),
    **dict.fromkeys(("chunk_hgrn", "fused_recurrent_hgrn"), scan),
}  # fmt: skip


def _one_dtype(options: dict[str, Any]) -> dict[str, Any]:
    """Convert q, k, v and erasing vectors to one dtype, and gates to that or float32; fla accepts any mix."""
    dtype = torch.promote_types(torch.promote_types(options["q"].dtype, options["k"].dtype), options["v"].dtype)
    same = {name: options[name].to(dtype) for name in ("q", "k", "v")}
    if "erase" in options:
        same["erase"] = tuple(t.to(dtype) for t in options["erase"])
    gates = {name: _gate(options[name], dtype) for name in ("decay", "beta", "bonus") if options.get(name) is not None}
    return {**{name: value for name, value in options.items() if value is not None}, **same, **gates, "cu_seqlens": options["cu_seqlens"]}


def _gate(t: Tensor, dtype: torch.dtype) -> Tensor:
    return t if t.dtype == dtype else t.to(torch.promote_types(dtype, torch.float32))


def _to_float32(t: Tensor, like: Tensor) -> Tensor:
    return t.to(torch.promote_types(like.dtype, torch.float32))


def _reversed(tensors: dict[str, Any]) -> dict[str, Any]:
    """Reverse every sequence; of packed ones the whole row is reversed, and with it their order."""
    cut = tensors["cu_seqlens"]
    turned: dict[str, Any] = {name: t.flip(1) for name, t in tensors.items() if isinstance(t, Tensor) and t.ndim > 2}
    if "erase" in tensors:
        turned["erase"] = tuple(t.flip(1) for t in tensors["erase"])
    return {**tensors, **turned, "cu_seqlens": None if cut is None else cut[-1] - cut.flip(0)}


def _in_reverse(state: Tensor | None, cu_seqlens: Tensor | None) -> Tensor | None:
    return state if state is None or cu_seqlens is None else state.flip(0)
