"""ABC against fla-core's recurrence, and in float64 against averages over every prefix, with gradients."""

import pytest
import torch

from linattn.mixers import create
from tests.oracles.compare import distance, fla


def heads_of(mixer, x):
    """q, k, v and the logarithms of the control, [B, H, T, ...]."""
    projections = (mixer.q_proj, mixer.k_proj, mixer.v_proj, mixer.s_proj)
    return [(x @ p.weight.T).unflatten(-1, (mixer.heads, -1)).transpose(1, 2) for p in projections]


def prefixes(q, k, v, s):
    """For each token the slots as weighted averages of the tokens up to it, and softmax attention to these."""
    outputs = []
    for t in range(1, q.shape[2] + 1):
        share = s[:, :, :t].softmax(2)  # over time: [B, H, t, M]
        keys, values = share.mT @ k[:, :, :t], share.mT @ v[:, :, :t]  # [B, H, M, K], [B, H, M, V]
        scores = q[:, :, t - 1 : t] @ keys.mT * q.shape[-1] ** -0.5
        outputs.append(scores.softmax(-1) @ values)
    return torch.cat(outputs, 2), keys, values


def test_fla():
    mixer, x = create("abc", dim=64), 2 * torch.randn(2, 75, 64)
    with torch.no_grad():
        o, (keys, values) = fla("abc").naive_recurrent_abc(*heads_of(mixer, x), output_final_state=True)
        y, state = mixer(x, return_state=True)
        assert distance(y, o.transpose(1, 2).flatten(2) @ mixer.o_proj.weight.T) < 1e-5
        assert distance(state["keys"], keys) < 1e-5 and distance(state["values"], values) < 1e-5


@pytest.mark.parametrize(("heads", "slots", "size"), [(4, 64, 2.0), (2, 3, 30.0)])
def test_values_states_and_gradients(heads, slots, size):
    torch.manual_seed(0)
    mixer = create("abc", dim=32, heads=heads, slots=slots).double()
    x = (size * torch.randn(2, 70, 32, dtype=torch.float64)).requires_grad_()
    y, state = mixer(x, return_state=True)
    o, keys, values = prefixes(*heads_of(mixer, x))
    wanted = o.transpose(1, 2).flatten(2) @ mixer.o_proj.weight.T
    assert distance(y, wanted) < 1e-12
    assert distance(state["keys"].mT, keys) < 1e-12 and distance(state["values"], values) < 1e-12
    ours, theirs = (torch.autograd.grad(o.pow(3).sum(), (x, *mixer.parameters())) for o in (y, wanted))
    assert all(distance(a, b) < 1e-10 for a, b in zip(ours, theirs, strict=True))


def test_controls_that_would_overflow():
    """exp(1000) is infinite in float64; a larger later control only decays the slot."""
    mixer = create("abc", dim=32, heads=2, slots=16).double()
    with torch.no_grad():
        mixer.s_proj.weight.copy_(1000 * torch.eye(32))
    x = torch.randn(1, 20, 32, dtype=torch.float64)
    o, _, _ = prefixes(*heads_of(mixer, x))
    assert distance(mixer(x), o.transpose(1, 2).flatten(2) @ mixer.o_proj.weight.T) < 1e-12
