"""RWKV-5's time mixing against the authors' package with the same weights."""

import pytest
import torch

from linattn.mixers import create
from tests.oracles.compare import distance
from tests.oracles.rwkv import NONE, norm, package, scattered

DIM, HEADS = 64, 2


def mixer():
    return scattered(create("rwkv5", dim=DIM, head_size=DIM // HEADS), time_decay=1.0)


def theirs(m, x):
    """x [T, D] before the norm -> what a layer adds to it, the last state [H, K, V]."""
    decay, bonus = (-m.time_decay.exp()).exp().view(HEADS, -1, 1), m.time_faaaa.view(HEADS, -1, 1)
    matrices = [p.weight.T for p in (m.k_proj, m.v_proj, m.r_proj, m.g_proj, m.o_proj)]
    y, _, state = package().RWKV.att_seq_v5_2(
        None, x, torch.zeros(DIM), torch.zeros(HEADS, DIM // HEADS, DIM // HEADS), torch.ones(DIM), torch.zeros(DIM),
        m.norm.weight, m.norm.bias, m.time_mix_k, m.time_mix_v, m.time_mix_r, m.time_mix_g, decay, bonus, *matrices, *5 * NONE,
    )  # fmt: skip
    return y - x, state


@pytest.mark.parametrize("tokens", [1, 75])
def test_values_states_and_gradients(tokens):
    m, x = mixer(), torch.randn(2, tokens, DIM, requires_grad=True)
    y, state = m(norm(x), return_state=True)
    ys, states = zip(*(theirs(m, row) for row in x), strict=True)
    assert distance(y, torch.stack(ys)) < 1e-5
    assert distance(state["S"], torch.stack(states)) < 1e-5
    gradients = [torch.autograd.grad(o.square().sum(), x, retain_graph=True)[0] for o in (y, torch.stack(ys))]
    assert distance(*gradients) < 1e-5


def test_decoding():
    m, x, state, y = mixer(), torch.randn(1, 24, DIM), None, []
    for piece in norm(x).split([19, 1, 1, 1, 1, 1], 1):
        o, state = m(piece, state, return_state=True)
        y.append(o)
    assert distance(torch.cat(y, 1)[0], theirs(m, x[0])[0]) < 1e-5
