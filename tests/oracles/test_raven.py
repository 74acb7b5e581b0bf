"""Raven against fla-core's recurrence of gated slots, and the whole layer in float64, token by token, with gradients."""

import pytest
import torch
import torch.nn.functional as F

from linattn.mixers import create
from tests.oracles.compare import assert_graded, distance, fla, naive_distance
from tests.oracles.test_gsa import slot_attention


def layer(mixer, x):
    """[1, T, D] -> [1, T, D]; the shares of slots by sorting, one token and head after the other."""
    q, k, v = (F.silu(x[0] @ p.weight.T).unflatten(-1, (mixer.heads, -1)) for p in (mixer.q_proj, mixer.k_proj, mixer.v_proj))
    q, k = (F.rms_norm(t, t.shape[-1:], n.weight, 1e-5) for t, n in ((q, mixer.q_norm), (k, mixer.k_norm)))
    scores = torch.sigmoid(x[0] @ mixer.router.weight.T).unflatten(-1, (mixer.heads, -1))
    least = scores.sort(-1, descending=True).values[..., mixer.active - 1 : mixer.active]
    kept = torch.where(scores >= least, scores, 0.0)
    step = F.softplus(x[0] @ mixer.a_proj.weight.T + mixer.dt_bias)
    alpha = (-mixer.A_log.exp() * step)[..., None] * kept / (kept.sum(-1, keepdim=True) + 1e-9)
    o, _, _ = slot_attention(q, k, v, 1 - alpha.exp(), alpha.exp())
    return F.rms_norm(F.silu(o.flatten(1)), x.shape[-1:], mixer.norm.weight, 1e-5)[None] @ mixer.o_proj.weight.T


def test_fla():
    def naive(r):
        return fla("gsa").naive_recurrent_gsa(r.q, r.k, r.v, r.write, r.fade, scale=r.scale)[0]

    torch.manual_seed(0)
    assert naive_distance(create("raven", dim=64), naive, 2 * torch.randn(2, 75, 64)) < 1e-5


@pytest.mark.parametrize(("heads", "slots", "active"), [(4, 64, 32), (2, 6, 1), (2, 5, 5)])
def test_one_by_one(heads, slots, active):
    torch.manual_seed(heads)
    mixer = create("raven", dim=32, heads=heads, slots=slots, active=active).double()
    for norm in (mixer.norm, mixer.q_norm, mixer.k_norm):
        torch.nn.init.normal_(norm.weight)
    x = 2 * torch.randn(1, 40, 32, dtype=torch.float64)
    assert_graded(mixer, lambda x: layer(mixer, x), x, list(mixer.parameters()), 1e-10)


@torch.no_grad()
def test_slots_that_are_not_chosen_stay_as_they_are():
    torch.manual_seed(1)
    mixer, x = create("raven", dim=32, slots=8, active=3), torch.randn(1, 12, 32)
    _, state = mixer(x[:, :-1], return_state=True)
    _, after = mixer(x[:, -1:], state, return_state=True)
    same = (state["values"] == after["values"]).all(-1)  # [1, H, slots]
    assert torch.equal(same, mixer.routed(x[:, -1:])[:, 0] == 0) and same.sum() == 4 * 5
    assert torch.equal((state["keys"] == after["keys"]).all(-2), same)
    assert distance(after["values"], state["values"]) > 0
