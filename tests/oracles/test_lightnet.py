"""LightNet against fla-core's recurrence with gates by torch.logcumsumexp, and in float64 against averages over every prefix."""

import pytest
import torch
import torch.nn.functional as F

from linattn.mixers import create
from tests.oracles.compare import distance, fla


def heads_of(mixer, x):
    """Queries, the logarithms of the keys' weights and values, [B, T, H, ...]."""
    q, k, v = ((x @ p.weight.T).unflatten(-1, (mixer.heads, -1)) for p in (mixer.q_proj, mixer.k_proj, mixer.v_proj))
    return F.silu(q), k, v


def read(mixer, o, x):
    low, high = mixer.g_proj
    gate = F.silu(x @ low.weight.T @ high.weight.T)
    return (F.rms_norm(o.flatten(2), x.shape[-1:], mixer.norm.weight, 1e-6) * gate) @ mixer.o_proj.weight.T


def prefixes(q, k, v):
    """For each token a state whose rows are averages of the values up to it, by a softmax over time."""
    outputs, states = [], []
    for t in range(1, q.shape[1] + 1):
        states.append(torch.einsum("bthk,bthv->bhkv", k[:, :t].softmax(1), v[:, :t]))
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t - 1], states[-1]) * q.shape[-1] ** -0.5)
    return torch.stack(outputs, 1), states[-1]


def test_fla():
    mixer, x = create("lightnet", dim=64, head_dim=16), 2 * torch.randn(2, 75, 64)
    with torch.no_grad():
        q, k, v = heads_of(mixer, x)
        total = k.double().logcumsumexp(1)
        fade = F.pad(total[:, :-1], (0, 0, 0, 0, 1, 0), value=-torch.inf) - total
        o, s = fla("gla").naive_recurrent_gla(q, (k - total).exp().float(), v, fade.float(), output_final_state=True)
        y, state = mixer(x, return_state=True)
        assert distance(y, read(mixer, o, x)) < 1e-5
        assert distance(state["S"], s) < 1e-5
        assert distance(state["log_total"], total[:, -1].flatten(1)) < 1e-6


@pytest.mark.parametrize(("size", "spread"), [(32, 2.0), (8, 30.0)])
def test_values_states_and_gradients(size, spread):
    torch.manual_seed(0)
    mixer = create("lightnet", dim=32, head_dim=size).double()
    torch.nn.init.normal_(mixer.norm.weight)
    x = (spread * torch.randn(2, 70, 32, dtype=torch.float64)).requires_grad_()
    y, state = mixer(x, return_state=True)
    o, last = prefixes(*heads_of(mixer, x))
    wanted = read(mixer, o, x)
    assert distance(y, wanted) < 1e-12
    assert distance(state["S"], last) < 1e-12
    ours, theirs = (torch.autograd.grad(o.pow(3).sum(), (x, *mixer.parameters())) for o in (y, wanted))
    assert all(distance(a, b) < 1e-10 for a, b in zip(ours, theirs, strict=True))


def test_bad_sizes_are_refused():
    with pytest.raises(ValueError, match="dim must be a multiple of head_dim = 20, but came as 32"):
        create("lightnet", dim=32, head_dim=20)
