"""RWKV-7's time mixing against the authors' package with the same weights."""

import pytest
import torch

from linattn.mixers import create
from tests.oracles.compare import distance
from tests.oracles.rwkv import package, scattered

DIM, HEADS = 64, 2
NAMES = ("x_r", "x_w", "x_k", "x_v", "x_a", "x_g", "w0", "w1", "w2", "a0", "a1", "a2", "v0", "v1", "v2", "g1", "g2", "k_k", "k_a", "r_k")
LINEARS = ("receptance", "key", "value", "output")


def weights():
    """Of a layer as training code stores them; v0, v1 and v2 are there in the first layer too and unused."""
    random = torch.Generator().manual_seed(0)
    shapes = {**dict.fromkeys(NAMES, (DIM,)), **{f"{n}1": (DIM, 32) for n in "wavg"}, **{f"{n}2": (32, DIM) for n in "wavg"}}
    shapes |= {"r_k": (HEADS, DIM // HEADS), **{f"{n}.weight": (DIM, DIM) for n in LINEARS}, "ln_x.weight": (DIM,), "ln_x.bias": (DIM,)}
    scale = {name: 2.0 if name in ("w0", "a0") else 0.3 for name in shapes}
    return {name: scale[name] * torch.randn(shape, generator=random) for name, shape in shapes.items()}


def theirs(w, x, state=None):
    """x [T, D] -> outputs, the last state [H, V, K]."""
    state = torch.zeros(HEADS, DIM // HEADS, DIM // HEADS) if state is None else state
    matrices = [w[f"{name}.weight"].T for name in LINEARS]
    names = [w[name].flatten() if name == "r_k" else w[name] for name in NAMES]
    arguments = (*names, *matrices, w["ln_x.weight"], w["ln_x.bias"])
    y, _, state, _ = package(seven=True).RWKV_x070_TMix_seq(0, HEADS, DIM // HEADS, x, torch.zeros(DIM), torch.empty(0), state, *arguments)
    return y, state


@pytest.mark.parametrize("tokens", [1, 75])
def test_values_states_and_gradients(tokens):
    w, mixer = weights(), create("rwkv7", dim=DIM, head_size=DIM // HEADS)
    mixer.load_rwkv({name: t.view(1, 1, -1) if t.ndim == 1 and "ln" not in name else t for name, t in w.items()})
    x = torch.randn(2, tokens, DIM, requires_grad=True)
    y, state = mixer(x, return_state=True)
    rows = [theirs(w, row) for row in x]
    assert distance(y, torch.stack([y for y, _ in rows])) < 1e-5
    assert distance(state["S"].mT, torch.stack([s for _, s in rows])) < 1e-5
    gradients = [torch.autograd.grad(o.square().sum(), x)[0] for o in (y, torch.stack([y for y, _ in rows]))]
    assert distance(*gradients) < 1e-5


def test_decoding():
    w, mixer = weights(), create("rwkv7", dim=DIM, head_size=DIM // HEADS)
    mixer.load_rwkv(w)
    x, state, y = torch.randn(1, 24, DIM), None, []
    for piece in x.split([19, 1, 1, 1, 1, 1], 1):
        o, state = mixer(piece, state, return_state=True)
        y.append(o)
    assert distance(torch.cat(y, 1)[0], theirs(w, x[0])[0]) < 1e-5


def test_the_beginning():
    """What training code makes of a fresh layer: decays from 0.995 to 0.55 and an output of zero."""
    mixer = create("rwkv7", dim=128)
    decay = torch.exp(-(-0.5 * torch.ones(())).exp() * mixer.w0.sigmoid())
    assert decay.max() > 0.995 and decay.min() < 0.58
    assert not mixer(torch.randn(1, 5, 128)).any()
    assert scattered(mixer)(torch.randn(1, 5, 128)).any()
