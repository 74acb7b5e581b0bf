"""Compare fla's patched functions with its token-by-token references, in a process with fla on its path; prints one JSON object.

With fla importable transformers assumes a GPU, so the tests' process must not have it.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
import torch._dynamo
import torch.nn.functional as F
from torch import Tensor

B, T, H, K, V = 2, 37, 2, 8, 12
Tensors = dict[str, Tensor]


def inputs() -> Tensors:
    torch.manual_seed(0)
    q, k, p, a = (F.normalize(torch.randn(B, T, H, K), dim=-1) for _ in range(4))
    g, w, beta = F.logsigmoid(torch.randn(B, T, H)), F.logsigmoid(torch.randn(B, T, H, K)), torch.rand(B, T, H)
    state, v, u = torch.randn(B, H, K, V), torch.randn(B, T, H, V), torch.randn(H, K)
    return {"q": q, "k": k, "v": v, "g": g, "w": w, "beta": beta, "u": u, "a": a, "b": -a * torch.rand(B, T, H, 1), "p": p, "S": state}


def headed(function: Callable, *names: str) -> Callable[[Tensors], Any]:
    """Adapter for references with [B, H, T, ...]."""

    def run(t: Tensors) -> Any:
        given = [t[name] if name == "u" else t[name].transpose(1, 2) for name in names]
        o, state = function(*given, initial_state=t["S"], output_final_state=True)
        return o.transpose(1, 2), state

    return run


def references() -> dict[str, tuple[str, Callable[[Tensors], Any], Callable[[Tensors], dict[str, Any]]]]:
    """By case: fla's function, its reference, and the arguments of the function besides k, v and the state."""

    def naive(module: str, name: str) -> Callable:
        return getattr(import_module(f"fla.ops.{module}"), name)

    def pick(**arguments: str) -> Callable[[Tensors], dict[str, Any]]:
        return lambda t: {name: t[of] for name, of in arguments.items()}

    def last(function: Callable, **arguments: str) -> Callable[[Tensors], Any]:
        return lambda t: function(**pick(**arguments)(t), k=t["k"], v=t["v"], initial_state=t["S"], output_final_state=True)

    gla, gdn = naive("gla.naive", "naive_recurrent_gla"), naive("gated_delta_rule.naive", "naive_recurrent_gated_delta_rule")
    kda, comba = naive("kda.naive", "naive_recurrent_kda"), naive("comba.naive", "naive_chunk_comba")
    simple = naive("simple_gla.naive", "naive_recurrent_simple_gla")
    rwkv6 = headed(naive("rwkv6.recurrent_naive", "naive_recurrent_rwkv6"), "q", "k", "v", "w", "u")
    delta = headed(naive("delta_rule.naive", "delta_rule_recurrence"), "q", "k", "v", "beta")
    iplr = headed(naive("generalized_delta_rule.iplr.naive", "iplr_recurrence"), "q", "k", "v", "a", "b")
    dplr = headed(naive("generalized_delta_rule.dplr.naive", "dplr_recurrence"), "q", "k", "v", "a", "b", "w")
    return {
        "gla": ("chunk_gla", last(gla, q="q", gk="w"), pick(q="q", g="w")),
        "gla steps": ("fused_recurrent_gla", last(gla, q="q", gk="w"), pick(q="q", gk="w")),
        "simple_gla": ("chunk_simple_gla", last(simple, q="q", g="g"), pick(q="q", g="g")),
        "delta": ("chunk_delta_rule", delta, pick(q="q", beta="beta")),
        "gated delta": ("chunk_gated_delta_rule", last(gdn, q="q", g="g", beta="beta"), pick(q="q", g="g", beta="beta")),
        "kda": ("chunk_kda", last(kda, q="q", g="w", beta="beta"), pick(q="q", g="w", beta="beta")),
        "comba": ("chunk_comba", last(comba, q="q", p="p", g="g", beta="beta"), pick(q="q", p="p", g="g", beta="beta")),
        "rwkv6": ("fused_recurrent_rwkv6", rwkv6, pick(r="q", w="w", u="u")),
        "iplr": ("chunk_iplr_delta_rule", iplr, pick(q="q", a="a", b="b")),
        "dplr": ("chunk_dplr_delta_rule", dplr, pick(q="q", a="a", b="b", gk="w")),
        "rwkv7": ("chunk_rwkv7", dplr, lambda t: {"r": t["q"], "a": t["a"], "b": t["b"], "w": t["w"], "scale": K**-0.5}),
    }  # fmt: skip


def distance(mine: Tensor, wanted: Tensor) -> float:
    return float((mine - wanted).norm() / wanted.norm().clamp_min(1e-30))


def compared(ops: Any) -> dict[str, float]:
    """The largest relative error of outputs, states and gradients, by case."""
    worst = {}
    for case, (name, reference, arguments) in references().items():
        sides = []

        def patched(t: Tensors, name: str = name, arguments: Callable = arguments) -> Any:
            return getattr(ops, name)(k=t["k"], v=t["v"], **arguments(t), initial_state=t["S"], output_final_state=True)

        for run in (patched, reference):
            t = {name: tensor.clone().requires_grad_() for name, tensor in inputs().items()}
            o, state = run(t)
            used = [tensor for tensor in t.values() if tensor.requires_grad]
            gradients = torch.autograd.grad((o * o.detach().cos()).sum() + (state * state.detach().sin()).sum(), used, allow_unused=True)
            sides.append([o, state, *gradients])
        worst[case] = max(distance(mine, wanted) for mine, wanted in zip(*sides, strict=True) if mine is not None and wanted is not None)
        assert [t is None for t in sides[0]] == [t is None for t in sides[1]], case
    return worst


def variants(ops: Any) -> dict[str, float]:
    """Options of fla's functions, with equivalent calls."""
    t, found = inputs(), {}
    base = {"q": t["q"], "k": t["k"], "v": t["v"], "g": t["g"], "beta": t["beta"], "output_final_state": True}
    o, state = ops.chunk_gated_delta_rule(**base, initial_state=t["S"])
    for option in ("state_v_first", "transpose_state_layout"):
        turned = ops.chunk_gated_delta_rule(**base, initial_state=t["S"].mT, **{option: True})
        found[option] = max(distance(turned[0], o), distance(turned[1].mT, state))
    long = {**base, "q": 3 * t["q"], "k": 5 * t["k"]}
    found["l2norm"] = distance(ops.chunk_gated_delta_rule(**long, initial_state=t["S"], use_qk_l2norm_in_kernel=True)[0], o)
    raw = t["beta"].logit()
    gated = {**base, "beta": raw, "use_beta_sigmoid_in_kernel": True}
    found["sigmoid"] = distance(ops.chunk_gated_delta_rule(**gated, initial_state=t["S"])[0], o)
    packed = {name: value.reshape(1, -1, *value.shape[2:]) for name, value in base.items() if isinstance(value, Tensor)}
    cut = torch.tensor([0, T, 2 * T])
    both = ops.chunk_gated_delta_rule(**packed, cu_seqlens=cut, initial_state=t["S"], output_final_state=True)
    found["packed"] = max(distance(both[0].view_as(o), o), distance(both[1], state))
    a, bias, raw = torch.randn(H), torch.randn(H * K), torch.randn(B, T, H, K)
    decay = -a.exp()[:, None] * F.softplus(raw + bias.view(H, K))
    low = -5 * torch.sigmoid(a.exp()[:, None] * (raw + bias.view(H, K)))
    fused = {**base, "g": raw, "A_log": a, "dt_bias": bias, "use_gate_in_kernel": True}
    found["gate"] = distance(ops.chunk_kda(**fused)[0], ops.chunk_kda(**{**base, "g": decay})[0])
    found["bounded gate"] = distance(ops.chunk_kda(**fused, lower_bound=-5.0, safe_gate=True)[0], ops.chunk_kda(**{**base, "g": low})[0])
    back = {"q": t["q"], "k": t["k"], "v": t["v"], "g": t["g"], "output_final_state": True}
    flipped = ops.fused_recurrent_simple_gla(
        **{n: x.flip(1) if isinstance(x, Tensor) else x for n, x in back.items()}, initial_state=t["S"]
    )
    behind = ops.fused_recurrent_simple_gla(**back, initial_state=t["S"], reverse=True)
    found["reverse"] = max(distance(behind[0], flipped[0].flip(1)), distance(behind[1], flipped[1]))
    naive = import_module("fla.ops.linear_attn.naive").naive_recurrent_linear_attn
    positive = {"q": t["q"].abs(), "k": t["k"].abs(), "v": t["v"], "normalize": True, "output_final_state": True}
    z = torch.rand(B, 1, H, K)
    mine, wanted = ops.chunk_linear_attn(**positive, initial_state=(t["S"], z)), naive(**positive, initial_state=(t["S"], z))
    found["normalized"] = max(distance(mine[0], wanted[0]), *(distance(x, y) for x, y in zip(mine[1], wanted[1], strict=True)))
    gates = F.logsigmoid(torch.randn(B, T, 9)), torch.randn(B, T, 9), torch.randn(B, 9)
    mine = ops.fused_recurrent_hgrn(gates[1], gates[0], initial_state=gates[2], output_final_state=True)
    wanted = import_module("fla.ops.hgrn.naive").naive_recurrent_hgrn(gates[1], gates[0], gates[2], True)
    found["hgrn"] = max(distance(mine[0], wanted[0]), distance(mine[1], wanted[1]))
    o, state = ops.chunk_gla(q=t["q"].bfloat16(), k=t["k"].bfloat16(), v=t["v"].bfloat16(), g=t["w"], output_final_state=True)
    assert o.dtype == torch.bfloat16 and state.dtype == torch.float32
    assert ops.chunk_gla(t["q"], t["k"], t["v"], t["w"])[1] is None
    return found


def ours(value: Any) -> bool:
    """True for a function of linattn's."""
    return "linattn/hf/fla" in getattr(getattr(value, "__code__", None), "co_filename", "")


def main() -> None:
    warnings.simplefilter("ignore")
    import fla.ops as ops
    import fla.ops.gla as package

    from linattn import patch_fla

    before = {name: getattr(ops, name) for name in dir(ops) if callable(getattr(ops, name))}
    own = []

    def stand_in(q: Tensor, k: Tensor, v: Tensor, gk: Tensor | None = None, gv: Tensor | None = None, scale: float | None = None) -> str:
        own.append(gv)
        return "fla's own"

    original = package.fused_recurrent_gla
    found: dict[str, Any] = {}
    with patch_fla() as patch:
        import fla.ops.simple_gla.chunk as later

        found["references"], found["variants"] = compared(ops), variants(ops)
        found["everywhere"] = (
            package.chunk_gla is ops.chunk_gla is not before["chunk_gla"] and later.chunk_simple_gla is ops.chunk_simple_gla
        )
        found["names"], found["calls"], found["refused"] = (
            list(patch.names),
            dict(patch.calls),
            {n: dict(r) for n, r in patch.refused.items()},
        )
        t = inputs()
        wanted = ops.chunk_gla(t["q"], t["k"], t["v"], t["w"])[0]
        compiled = torch.compile(lambda t: ops.chunk_gla(t["q"], t["k"], t["v"], t["w"])[0] * 2, backend="eager")
        compilations = torch._dynamo.utils.counters["stats"]
        found["compiled"] = [distance(compiled(t), 2 * wanted) for _ in range(3)], compilations["unique_graphs"]
        try:
            ops.chunk_gla(t["q"], t["k"], t["v"], t["w"], heads=3)
        except TypeError as error:
            found["keyword"] = str(error)
        try:
            patch_fla()
        except ValueError as error:
            found["twice"] = str(error)
    found["restored"] = all(getattr(ops, name) is function for name, function in before.items()) and package.fused_recurrent_gla is original
    found["left"] = [name for name, module in list(sys.modules.items()) if name.startswith("fla") and any(map(ours, vars(module).values()))]
    ops.fused_recurrent_gla = stand_in
    with patch_fla(["fused_recurrent_gla"]) as patch:
        t = inputs()
        found["own"] = ops.fused_recurrent_gla(t["q"], t["k"], t["v"], gk=t["w"], gv=t["v"].abs().neg())
        found["too large"] = ops.fused_recurrent_gla(t["q"], t["k"], t["v"], gk=-t["w"])
        found["explained"] = patch.explain()
    for name, given in (("text", "chunk_gla"), ("unknown", ["chunk_glas"])):
        try:
            patch_fla(given)
        except ValueError as error:
            found[name] = str(error)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
