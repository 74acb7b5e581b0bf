"""The op against other libraries: the naive references of fla-core and transformers' chunk functions, in float32.

Their state is [N, H, K, V] like ours unless said otherwise. They compute in float32, so two correct answers differ by its
rounding: 5e-6 of the norm for outputs and states, 2e-5 for gradients.
"""

import pytest
import torch
from torch import Tensor

from tests.ops.cases import FORMS, Call, cotangent, gradients, make
from tests.ops.errors import compare, error
from tests.oracles import wheels

T = 96  # more than a chunk, and a multiple of 32 for two of the oracles


def fla(file: str):
    return wheels.module("fla-core==0.6.0", f"fla/ops/{file}.py")


def first(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Heads before time, as in half of the oracles."""
    return tuple(t.transpose(1, 2).contiguous() for t in tensors)


def tensors(call: Call, *names: str) -> tuple[Tensor, ...]:
    return tuple(call.tensors[n] for n in names)


def expect(call: Call, o: Tensor, s: Tensor | tuple | None = None, *, form: str = "chunk") -> None:
    """Compare our outputs and states with theirs."""
    out = call(form)
    wanted = {"o": o}
    if s is not None:
        wanted |= dict(zip(("S", "z"), s, strict=True)) if isinstance(s, tuple) else {"S": s}
    for name, theirs in wanted.items():
        assert error(out[name], theirs) < 5e-6, f"{name} differs by {error(out[name], theirs):.1e}"


def case(kind: str, rank: str, **sizes: object) -> Call:
    return make(kind, rank, **{"T": T, "K": 16, "V": 8, **sizes}).to(torch.float32)


@pytest.mark.parametrize("form", FORMS)
def test_linear_attention(form):
    call, naive = case("plain", "none"), fla("linear_attn/naive")
    q, k, v, s = tensors(call, "q", "k", "v", "S")
    expect(call, *naive.naive_recurrent_linear_attn(q, k, v, initial_state=s, output_final_state=True), form=form)


@pytest.mark.parametrize("form", FORMS)
def test_normalized_linear_attention(form):
    call = case("normalize", "none").set(normalize=1e-10)
    q, k, v, s, z = tensors(call, "q", "k", "v", "S", "z")
    o, (s, z) = fla("linear_attn/naive").naive_recurrent_linear_attn(
        q, k, v, initial_state=(s, z[:, None]), output_final_state=True, normalize=True
    )
    expect(call, o, (s, z[:, 0]), form=form)


@pytest.mark.parametrize("form", FORMS)
def test_simple_gla(form):
    call, naive = case("plain", "BTH"), fla("simple_gla/naive")
    q, k, v, g, s = tensors(call, "q", "k", "v", "decay", "S")
    expect(call, *naive.naive_recurrent_simple_gla(q, k, v, g, initial_state=s), form=form)
    expect(call.without("S"), naive.naive_parallel_simple_gla(q, k, v, g)[0], form=form)


@pytest.mark.parametrize("form", FORMS)
def test_gla(form):
    call = case("plain", "BTHK")
    q, k, v, g, s = tensors(call, "q", "k", "v", "decay", "S")
    expect(call, *fla("gla/naive").naive_recurrent_gla(q, k, v, g, initial_state=s, output_final_state=True), form=form)


@pytest.mark.parametrize("form", FORMS)
def test_retention(form):
    call = case("plain", "H", H=4, initial=False)
    decay = torch.log(1 - 2.0 ** (-5 - torch.arange(4)))
    (o,) = first(fla("retention/naive").naive_retention(*first(*tensors(call, "q", "k", "v"))))
    expect(call.with_(decay=decay), o, form=form)


@pytest.mark.parametrize("form", FORMS)
def test_delta_rule(form):
    call, naive = case("beta", "none"), fla("delta_rule/naive")
    q, k, v, beta, s = tensors(call, "q", "k", "v", "beta", "S")
    o, s = naive.delta_rule_recurrence(*first(q, k, v, beta), initial_state=s)
    expect(call, *first(o), s, form=form)
    o, s = naive.delta_rule_chunkwise(*first(q, k, v, beta))[:2]
    expect(call.without("S"), *first(o), form=form)


@pytest.mark.parametrize("form", FORMS)
def test_gated_delta_rule(form):
    call, naive = case("beta", "BTH"), fla("gated_delta_rule/naive")
    q, k, v, beta, g, s = tensors(call, "q", "k", "v", "beta", "decay", "S")
    options = {"initial_state": s, "output_final_state": True}
    expect(call, *naive.naive_recurrent_gated_delta_rule(q, k, v, beta=beta, g=g, **options), form=form)
    expect(call, *naive.naive_chunk_gated_delta_rule(q, k, v, g=g, beta=beta, **options), form=form)


@pytest.mark.parametrize("form", FORMS)
def test_kimi_delta_attention(form):
    call = case("beta", "BTHK", H=4, Hk=2)
    q, k, v, g, beta, s = tensors(call, "q", "k", "v", "decay", "beta", "S")
    expect(call, *fla("kda/naive").naive_recurrent_kda(q, k, v, g, beta, initial_state=s, output_final_state=True), form=form)


@pytest.mark.parametrize("form", FORMS)
def test_rwkv7(form):
    call, naive = case("erase", "BTHK"), fla("generalized_delta_rule/dplr/naive")
    arguments = first(*tensors(call, "q", "k", "v", "read", "write", "decay"))
    o, s = naive.dplr_recurrence(*arguments, initial_state=call.tensors["S"])
    expect(call, *first(o), s, form=form)
    o, s = naive.dplr_chunkwise(*arguments, initial_state=call.tensors["S"])
    expect(call, *first(o), s, form=form)


@pytest.mark.parametrize("form", FORMS)
def test_comba(form):
    """Only fla's chunk version, which reads the state before its decay like its kernels; the recurrent one decays first."""
    call = case("plain", "BTH")
    q, k, v, g, s = tensors(call, "q", "k", "v", "decay", "S")
    k, beta = k / k.norm(dim=-1, keepdim=True), torch.rand(2, T, 2, generator=torch.Generator().manual_seed(0))
    p = 0.7 * k
    o, s = fla("comba/naive").naive_chunk_comba(q, k, v, p, g, beta, initial_state=s, output_final_state=True)
    ours = call.with_(k=k, v=v * beta[..., None], read=p, write=-beta[..., None] * k)
    expect(ours, o, s, form=form)


@pytest.mark.parametrize("rank", ["HK", "BTHK"])
@pytest.mark.parametrize("form", FORMS)
def test_rwkv5_and_rwkv6(form, rank):
    call, naive = case("bonus", rank), fla("rwkv6/recurrent_naive")
    q, k, v, w, u, s = tensors(call, "q", "k", "v", "decay", "bonus", "S")
    w = w.expand(q.shape)
    o, s = naive.naive_recurrent_rwkv6(*first(q, k, v, w), u, initial_state=s, output_final_state=True)
    expect(call, *first(o), s, form=form)


@pytest.mark.parametrize("initial", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_transformers_gated_delta_rule(form, initial):
    modeling = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    call = case("beta", "BTH", initial=initial, T=100)
    q, k, v, g, beta = tensors(call, "q", "k", "v", "decay", "beta")
    o, s = modeling.torch_chunk_gated_delta_rule(
        q, k, v, g=g, beta=beta, initial_state=call.tensors.get("S"), output_final_state=True, use_qk_l2norm_in_kernel=False
    )
    expect(call, o, s, form=form)


@pytest.mark.parametrize("form", FORMS)
def test_transformers_mamba2_scan(form):
    """x scaled by the step is v, the state is [B, H, V, K], groups are shared heads and the scale is 1."""
    modeling = pytest.importorskip("transformers.models.mamba2.modeling_mamba2")
    if not hasattr(modeling, "mamba2_chunk_scan"):
        pytest.skip("this transformers has no scan function of its own; the oracle test of the mixer covers it")
    call = case("plain", "BTH", H=4, Hk=2, T=100).set(scale=1.0)
    q, k, v, s = tensors(call, "q", "k", "v", "S")
    random = torch.Generator().manual_seed(0)
    dt, a = torch.rand(2, 100, 4, generator=random), -torch.rand(4, generator=random) * 4
    o, s = modeling.mamba2_chunk_scan(v, dt, a, k, q, 32, initial_states=s.mT, return_final_states=True)
    expect(call.with_(v=v * dt[..., None], decay=a * dt), o, s.mT, form=form)


def oracle_gradients(call: Call, run) -> dict[str, Tensor]:
    """Gradients through the other implementation, weighted as :func:`tests.ops.cases.gradients` weighs."""
    leaves = {n: t.detach().clone().requires_grad_() for n, t in call.tensors.items()}
    o, s = run(leaves)
    grads = torch.autograd.grad([o, s], list(leaves.values()), [cotangent(o), cotangent(s)])
    return dict(zip(leaves, grads, strict=True))


@pytest.mark.parametrize(
    ("kind", "rank", "file", "run"),
    [
        ("plain", "BTHK", "gla/naive", lambda m, t: m.naive_recurrent_gla(t["q"], t["k"], t["v"], t["decay"], t["S"], True)),
        (
            "beta", "BTH", "gated_delta_rule/naive",
            lambda m, t: m.naive_recurrent_gated_delta_rule(t["q"], t["k"], t["v"], t["beta"], t["decay"], None, t["S"], True),
        ),
        (
            "beta", "BTHK", "kda/naive",
            lambda m, t: m.naive_recurrent_kda(t["q"], t["k"], t["v"], t["decay"], t["beta"], None, t["S"], True),
        ),
    ],
    ids=["gla", "gated_delta_rule", "kda"],
)  # fmt: skip
def test_gradients(kind, rank, file, run):
    call = case(kind, rank, T=70)
    compare(gradients(call, form="chunk")[1], oracle_gradients(call, lambda t: run(fla(file), t)), 2e-5)
