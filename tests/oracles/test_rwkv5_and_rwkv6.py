"""Time mixing of RWKV-5 and RWKV-6 against the authors' package with the same weights, and RWKV-6's recurrence against fla-core's."""

import pytest
import torch

from linattn.mixers import CallContext, create
from tests.oracles import wheels
from tests.oracles.compare import distance
from tests.oracles.rwkv import NONE, norm, package, scattered

DIM, HEADS = 64, 2
both = pytest.mark.parametrize("name", ["rwkv5", "rwkv6"])


def mixer(name):
    return scattered(create(name, dim=DIM, head_size=DIM // HEADS), time_decay=1.0)


def theirs(m, x):
    """x [T, D] before the norm -> what a layer adds to it, the last state [H, K, V]."""
    decay, bonus = (t.view(HEADS, -1, 1) for t in (m.time_decay, m.time_faaaa))
    if m.info.name == "rwkv5":
        layer = package().RWKV.att_seq_v5_2
        own = [getattr(m, f"time_mix_{name}") for name in ("k", "v", "r", "g")]
        decay = (-decay.exp()).exp()
    else:
        layer = package().RWKV.att_seq_v6_0
        own = [getattr(m, f"time_maa_{name}") for name in ("x", "w", "k", "v", "r", "g")]
        own += [m.time_maa_w1, m.time_maa_w2, m.time_decay_w1, m.time_decay_w2]
    matrices = [p.weight.T for p in (m.k_proj, m.v_proj, m.r_proj, m.g_proj, m.o_proj)]
    state = torch.zeros(HEADS, DIM // HEADS, DIM // HEADS)
    y, _, state = layer(
        None, x, torch.zeros(DIM), state, torch.ones(DIM), torch.zeros(DIM), m.norm.weight, m.norm.bias, *own, decay, bonus, *matrices,
        *5 * NONE,
    )  # fmt: skip
    return y - x, state


@both
@pytest.mark.parametrize("tokens", [1, 75])
def test_values_states_and_gradients(name, tokens):
    m, x = mixer(name), torch.randn(2, tokens, DIM, requires_grad=True)
    y, state = m(norm(x), return_state=True)
    ys, states = zip(*(theirs(m, row) for row in x), strict=True)
    assert distance(y, torch.stack(ys)) < 1e-5
    assert distance(state["S"], torch.stack(states)) < 1e-5
    gradients = [torch.autograd.grad(o.square().sum(), x, retain_graph=True)[0] for o in (y, torch.stack(ys))]
    assert distance(*gradients) < 1e-5


@both
def test_decoding(name):
    m, x, state, y = mixer(name), torch.randn(1, 24, DIM), None, []
    for piece in norm(x).split([19, 1, 1, 1, 1, 1], 1):
        o, state = m(piece, state, return_state=True)
        y.append(o)
    assert distance(torch.cat(y, 1)[0], theirs(m, x[0])[0]) < 1e-5


def test_recurrence_of_fla():
    m, x = mixer("rwkv6"), torch.randn(2, 75, DIM)
    naive = wheels.module("fla-core==0.6.0", "fla/ops/rwkv6/recurrent_naive.py").naive_recurrent_rwkv6
    with torch.no_grad():
        r, beside = m.tokens(x, CallContext(x))
        o, _ = naive(*(t.transpose(1, 2) for t in (r.q, r.k, r.v, r.decay)), r.bonus, scale=1.0)
        assert distance(m(x), m.finish(o.transpose(1, 2), beside)) < 1e-5


def test_weights_by_their_names():
    m = mixer("rwkv6")
    named = {"receptance": m.r_proj, "key": m.k_proj, "value": m.v_proj, "gate": m.g_proj, "output": m.o_proj}
    weights = {f"{name}.weight": p.weight for name, p in named.items()} | {"ln_x.weight": m.norm.weight, "ln_x.bias": m.norm.bias}
    for name, p in m.named_parameters(recurse=False):
        weights[name] = p.view(1, 1, -1) if p.ndim == 1 else p
    fresh = create("rwkv6", dim=DIM, head_size=DIM // HEADS)
    fresh.load_rwkv(weights)
    assert all(torch.equal(a, b) for a, b in zip(fresh.parameters(), m.parameters(), strict=True))
