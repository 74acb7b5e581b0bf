"""Forgetting attention against fla-core's, and the parts of its Pro block from the paper's equations."""

import pytest
import torch
import torch.nn.functional as F

from linattn.mixers import CallContext, create
from tests.oracles.compare import distance, fla


@pytest.mark.parametrize("piece", [256, 16])  # queries at a time
@pytest.mark.parametrize("pro", [True, False])
def test_fla(pro, piece):
    torch.manual_seed(0)
    mixer, x = create("fox", dim=64, pro=pro), 2 * torch.randn(2, 75, 64)
    mixer.piece = piece
    with torch.no_grad():
        r = mixer.project(x, CallContext(x))
        wanted = mixer.read(fla("forgetting_attn").naive_forgetting_attn(r.q, r.k, r.v, r.decay), x)
        assert distance(mixer(x), wanted) < 1e-5
        state, y = None, []
        for piece in x.split([30, 1, 1, 43], 1):
            o, state = mixer(piece, state, return_state=True)
            y.append(o)
        assert distance(torch.cat(y, 1), wanted) < 1e-5


def test_gradients():
    torch.manual_seed(1)
    mixer, x = create("fox", dim=32), torch.randn(2, 20, 32, requires_grad=True)
    r = mixer.project(x, CallContext(x))
    wanted = mixer.read(fla("forgetting_attn").naive_forgetting_attn(r.q, r.k, r.v, r.decay), x)
    ours = torch.autograd.grad(mixer(x).square().sum(), [x, *mixer.parameters()])
    theirs = torch.autograd.grad(wanted.square().sum(), [x, *mixer.parameters()])
    assert all(distance(g, w) < 1e-5 for g, w in zip(ours, theirs, strict=True))


def test_shift_and_norm_of_keys():
    """Section 3.2 of the paper: RMSNorm(α k_{t-1} + (1 - α) k_t) with α = σ(x w) of each head."""
    torch.manual_seed(2)
    mixer, x = create("fox", dim=32, heads=2), torch.randn(1, 6, 32)
    k = (x @ mixer.k_proj.weight.T).view(1, 6, 2, 16)
    last = F.pad(k, (0, 0, 0, 0, 1, 0))[:, :-1]
    gate = torch.sigmoid(x @ mixer.k_shift.weight.T)[..., None]
    wanted = torch.stack([F.rms_norm(t, (16,), eps=1e-5) for t in (gate * last + (1 - gate) * k).unbind(2)], 2)
    torch.testing.assert_close(mixer.project(x, CallContext(x)).k, wanted)


def test_a_long_memory_fades_exactly():
    """After 20000 tokens the sums of gates are large, but scores of neighbours are still exact in float32."""
    torch.manual_seed(3)
    mixer = create("fox", dim=32, heads=1, pro=False)
    double = create("fox", dim=32, heads=1, pro=False).double()
    double.load_state_dict(mixer.state_dict())
    state = {
        "k": torch.randn(1, 2, 1, 32), "v": torch.randn(1, 2, 1, 32), "valid": torch.ones(1, 2, dtype=torch.bool),
        "faded": torch.tensor([-6e4, -3.0]).view(1, 2, 1), "position": torch.tensor([20000]),
    }  # fmt: skip
    x = torch.randn(1, 1, 32)
    wide_state = {name: t.double() if t.is_floating_point() else t for name, t in state.items()}
    assert distance(mixer(x, state).double(), double(x.double(), wide_state)) < 1e-5
