"""The reference, which is the specification, against plain loops over numbers and the spelled-out definition."""

import math

import pytest
import torch

import linattn
from tests.ops import definition
from tests.ops.cases import FORMS, KINDS, RANKS, Call, cotangent, gradients, make
from tests.ops.errors import compare, error


def loops(call: Call) -> dict[str, torch.Tensor]:
    """One head, one row, plain Python numbers: every index written out."""
    n = {name: t.tolist() for name, t in call.tensors.items()}
    T, K, V = len(n["v"][0]), len(n["k"][0][0][0]), len(n["v"][0][0][0])
    decay = [[_decay(call, n, t, c) for c in range(K)] for t in range(T)]
    S, z, o = n["S"][0][0], n.get("z", [[[0.0] * K]])[0][0], []
    for t in range(T):
        q, k, v = n["q"][0][t][0], n["k"][0][t][0], n["v"][0][t][0]
        before, new = S, [[0.0] * V for _ in range(K)]
        for j in range(V):
            told = sum(k[c] * math.exp(decay[t][c]) * before[c][j] for c in range(K))
            value = n["beta"][0][t][0] * (v[j] - told) if "beta" in n else v[j]
            erased = sum(n["read"][0][t][0][c] * before[c][j] for c in range(K)) if "read" in n else 0.0
            for c in range(K):
                new[c][j] = math.exp(decay[t][c]) * before[c][j] + k[c] * value
                new[c][j] += n["write"][0][t][0][c] * erased if "write" in n else 0.0
        z = [math.exp(decay[t][c]) * z[c] + k[c] for c in range(K)]
        seen = new
        if "bonus" in n:
            seen = [[before[c][j] + n["bonus"][0][c] * k[c] * v[j] for j in range(V)] for c in range(K)]
        row = [sum(q[c] * seen[c][j] for c in range(K)) / math.sqrt(K) for j in range(V)]
        if "normalize" in call.options:
            row = [x / (sum(q[c] * z[c] for c in range(K)) / math.sqrt(K) + 1e-6) for x in row]
        o.append([row])
        S = new
    out = {"o": torch.tensor([o], dtype=torch.float64), "S": torch.tensor([[S]], dtype=torch.float64)}
    return {**out, "z": torch.tensor([[z]], dtype=torch.float64)} if "z" in n else out


def _decay(call: Call, n: dict, t: int, c: int) -> float:
    ranks = {0: lambda: 0.0, 1: lambda: n["decay"][0], 2: lambda: n["decay"][0][c]}
    ranks |= {3: lambda: n["decay"][0][t][0], 4: lambda: n["decay"][0][t][0][c]}
    return ranks[call.tensors["decay"].ndim if "decay" in n else 0]()


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("kind", KINDS)
def test_two_tokens_by_hand(kind, rank):
    call = make(kind, rank, B=1, T=2, H=1, K=2, V=2)
    compare(call(backend="reference"), loops(call), 1e-14)


@pytest.mark.parametrize("lengths", [None, (0, 3, 0, 0, 1, 4, 0)])
@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_the_definition(kind, rank, lengths):
    call = make(kind, rank, T=6, H=4, Hk=2, lengths=lengths)
    compare(call(backend="reference"), definition.results(call), 1e-13)


@pytest.mark.parametrize("kind", KINDS)
def test_its_gradients_are_the_definition_s(kind):
    call = make(kind, "BTHK", T=5, H=4, Hk=2)
    leaves = {n: t.clone().requires_grad_() for n, t in call.tensors.items()}
    out = definition.results(call.with_(**leaves))
    wanted = torch.autograd.grad(sum((y * cotangent(y)).sum() for y in out.values()), list(leaves.values()))
    compare(gradients(call, backend="reference")[1], dict(zip(leaves, wanted, strict=True)), 1e-12)


def test_without_decay_it_is_masked_attention_without_softmax():
    call = make("plain", "none", T=7, initial=False)
    q, k, v = (call.tensors[n].transpose(1, 2) for n in "qkv")
    o = ((q @ k.mT / 2).tril() @ v).transpose(1, 2)
    for form in FORMS:
        assert error(call(form)["o"], o) < 1e-14


@pytest.mark.parametrize(("option", "eps"), [(True, 1e-6), (0.0, 0.0), (0, 0.0), (1e-3, 1e-3), (2.5, 2.5)])
@pytest.mark.parametrize("form", FORMS)
def test_normalizers(option, eps, form):
    call = make("normalize", "BTH", T=70)
    divided, raw = call.set(normalize=option)(form), call.set(normalize="return")(form)
    assert raw["denominator"].shape == call.tensors["v"].shape[:3] and raw["denominator"].dtype == torch.float64
    assert error(divided["o"], raw["o"] / (raw["denominator"] + eps)[..., None]) < 1e-13
    z = call.tensors["z"]
    scaled = call.tensors["q"][:, 0] * 0.5
    first = call.tensors["decay"][:, 0].exp()[..., None] * z + call.tensors["k"][:, 0]
    assert error(raw["denominator"][:, 0], (scaled * first).sum(-1)) < 1e-13


@pytest.mark.parametrize("form", FORMS)
def test_scale(form):
    call = make("plain", "BTH", T=65)
    one = call.set(scale=1.0)(form)
    assert error(call(form)["o"], one["o"] / 2) < 1e-14  # K = 4
    assert error(call.set(scale=-0.3)(form)["o"], one["o"] * -0.3) < 1e-14
    assert error(call.set(scale=0.0)(form)["o"], one["o"] * 0) == 0
    assert error(call.set(scale=7)(form)["S"], one["S"]) < 1e-14
    raw = make("normalize", "BTH", T=65).set(normalize="return", scale=3.0)
    assert error(raw(form)["denominator"], raw.set(scale=1.0)(form)["denominator"] * 3) < 1e-14


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("normalize", [False, True, 0.5, "return"])
def test_without_causality_every_query_reads_the_total(normalize, form):
    call = make("normalize" if normalize else "plain", "none", T=5, H=4, Hk=2).set(causal=False, normalize=normalize)
    other = make("normalize", "none", T=67, Hk=2, H=2, seed=1).tensors["q"]
    call = call.with_(q=other)
    k, q = (call.tensors[n].repeat_interleave(2, 2) for n in "kq")
    s = call.tensors["S"] + torch.einsum("bthk,bthv->bhkv", k, call.tensors["v"])
    wanted = {"o": torch.einsum("bthk,bhkv->bthv", q, s) / 2, "S": s}
    if normalize:
        wanted["z"] = call.tensors["z"] + k.sum(1)
        denominator = torch.einsum("bthk,bhk->bth", q, wanted["z"]) / 2
        if normalize == "return":
            wanted["denominator"] = denominator
        else:
            wanted["o"] = wanted["o"] / (denominator + (1e-6 if normalize is True else normalize))[..., None]
    out, grads = gradients(call, form=form)
    compare(out, wanted, 1e-13)
    compare(grads, gradients(call, backend="reference")[1], 1e-10)


@pytest.mark.parametrize("form", FORMS)
def test_without_causality_packed_sequences_have_their_own_totals(form):
    call = make("normalize", "none", lengths=(3, 0, 66, 1), H=4, Hk=2).set(causal=False)
    out = call(form)
    for n in range(4):
        one = call.sequence(n)
        start, stop = call.options["cu_seqlens"][n : n + 2].tolist()
        compare({"o": out["o"][:, start:stop], "S": out["S"][n : n + 1], "z": out["z"][n : n + 1]}, one(backend="reference"), 1e-13)
    compare(gradients(call, form=form)[1], gradients(call, backend="reference")[1], 1e-10)


def test_a_normalizer_without_an_initial_state_starts_from_nothing():
    call = make("normalize", "BTHK", T=3)
    zero = call.with_(S=torch.zeros_like(call.tensors["S"]), z=torch.zeros_like(call.tensors["z"]))
    compare(call.without("S", "z")(), zero(), 1e-15)


def test_what_is_returned():
    t = make("normalize", "none", initial=False).tensors
    q, k, v = t["q"], t["k"], t["v"]
    assert isinstance(linattn.linear_attention(q, k, v), torch.Tensor)
    o, s = linattn.linear_attention(q, k, v, return_state=True)
    assert o.shape == v.shape and s.shape == (2, 2, 4, 3)
    o, (s, z) = linattn.linear_attention(q, k, v, normalize=True, return_state=True)
    assert s.shape == (2, 2, 4, 3) and z.shape == (2, 2, 4)
    (o, d), (s, z) = linattn.linear_attention(q, k, v, normalize="return", return_state=True)
    assert o.shape == v.shape and d.shape == (2, 9, 2) and z.shape == (2, 2, 4)
    o, d = linattn.linear_attention(q, k, v, normalize="return")
    assert o.shape == v.shape and d.shape == (2, 9, 2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", FORMS)
def test_dtypes_of_results(dtype, form):
    call = make("normalize", "BTH").set(normalize="return").to(dtype)
    out, wide = call(form), torch.float64 if dtype == torch.float64 else torch.float32
    assert {n: t.dtype for n, t in out.items()} == {"o": dtype, "denominator": wide, "S": wide, "z": wide}
