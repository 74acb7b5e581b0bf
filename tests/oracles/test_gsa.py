"""Gated slot attention against fla-core's recurrence, and in float64 against the paper's formulas, token by token, with gradients."""

import pytest
import torch
import torch.nn.functional as F

from linattn.mixers import create
from tests.oracles.compare import distance, fla, naive_distance


def slot_attention(q, k, v, write, alpha):
    """The slots of keys and values as lists of vectors: every argument [T, H, ...]; the outputs [T, H, V] and the last slots."""
    slots = write.shape[-1]
    keys, values = k.new_zeros(k.shape[1], slots, k.shape[2]), v.new_zeros(v.shape[1], slots, v.shape[2])
    outputs = []
    for t in range(len(q)):
        keys = alpha[t, :, :, None] * keys + write[t, :, :, None] * k[t, :, None]
        values = alpha[t, :, :, None] * values + write[t, :, :, None] * v[t, :, None]
        weights = torch.softmax(torch.einsum("hk,hmk->hm", q[t], keys), -1)
        outputs.append(torch.einsum("hm,hmv->hv", weights, values))
    return torch.stack(outputs), keys, values


def layer(mixer, x):
    """[T, D] -> [T, D] and the last slots."""
    q, k, v = (F.silu(x @ p.weight.T).unflatten(-1, (mixer.heads, -1)) for p in (mixer.q_proj, mixer.k_proj, mixer.v_proj))
    alpha = torch.sigmoid(x @ mixer.f_proj.weight.T).unflatten(-1, (mixer.heads, -1)) ** (1 / mixer.tau)
    o, keys, values = slot_attention(q, k, v, 1 - alpha, alpha)
    return F.rms_norm(F.silu(o.flatten(1)), x.shape[-1:], mixer.norm.weight, 1e-5) @ mixer.o_proj.weight.T, keys, values


def test_fla():
    def naive(r):
        return fla("gsa").naive_recurrent_gsa(r.q, r.k, r.v, r.write, r.fade, scale=r.scale)[0]

    assert naive_distance(create("gsa", dim=64), naive, 2 * torch.randn(2, 75, 64)) < 1e-5


@pytest.mark.parametrize(("heads", "slots", "tau"), [(4, 64, 8.0), (2, 5, 0.5)])
def test_values_states_and_gradients(heads, slots, tau):
    torch.manual_seed(0)
    mixer = create("gsa", dim=32, heads=heads, slots=slots, tau=tau).double()
    torch.nn.init.normal_(mixer.norm.weight)
    x = 2 * torch.randn(70, 32, dtype=torch.float64, requires_grad=True)
    y, state = mixer(x[None], return_state=True)
    wanted, keys, values = layer(mixer, x)
    assert distance(y[0], wanted) < 1e-12
    assert distance(state["keys"][0].mT, keys) < 1e-12 and distance(state["values"][0], values) < 1e-12
    ours, theirs = (torch.autograd.grad(o.pow(3).sum(), (x, *mixer.parameters())) for o in (y, wanted))
    assert all(distance(a, b) < 1e-10 for a, b in zip(ours, theirs, strict=True))


def test_slots_that_hardly_fade_are_filled_exactly():
    """1 - α would be 0 in float32 where α rounds to 1."""
    mixer = create("gsa", dim=32, tau=1e6)
    x = torch.randn(1, 300, 32)
    exact = create("gsa", dim=32, tau=1e6).double()
    exact.load_state_dict(mixer.state_dict())
    (_, state), (_, wanted) = (m(x.to(m.o_proj.weight.dtype), return_state=True) for m in (mixer, exact))
    assert distance(state["values"], wanted["values"]) < 1e-5
