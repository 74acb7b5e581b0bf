"""Log-linear attention against fla-core's matrix of levels."""

import pytest
import torch

from linattn.mixers import CallContext, create
from tests.oracles.compare import distance, fla


def naive(r):
    return fla("log_linear_attn").naive_log_linear_attn(r.q, r.k, r.v, r.decay, r.weights, scale=1.0) + r.skip


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("tokens", [2, 64, 100])
def test_fla(groups, tokens):
    torch.manual_seed(tokens)
    mixer, x = create("log_linear", dim=32, head_dim=16, state_size=12, groups=groups, levels=8), torch.randn(2, tokens, 32)
    torch.nn.init.normal_(mixer.level_scale, std=3.0)
    with torch.no_grad():
        wanted = mixer.read(naive(mixer.project(x, CallContext(x))), x)
        assert distance(mixer(x), wanted) < 1e-5
        state, y = None, []
        for piece in x.split([1, tokens // 2, tokens - 1 - tokens // 2], 1):
            o, state = mixer(piece, state, return_state=True)
            y.append(o)
        assert distance(torch.cat(y, 1), wanted) < 1e-5


def test_equal_weights_are_mamba2():
    """With λ = 1 everywhere the buckets add up to the one state of Mamba-2."""
    torch.manual_seed(0)
    mixer, plain, x = create("log_linear", dim=32), create("mamba2", dim=32), torch.randn(1, 50, 32)
    plain.load_state_dict({name: t for name, t in mixer.state_dict().items() if not name.startswith("level")})
    torch.nn.init.zeros_(mixer.level_scale)  # softplus(0) = ln 2, so scale the values
    with torch.no_grad():
        r = mixer.project(x, CallContext(x))
        o = mixer.attend(r, CallContext(x, returning=False)) / torch.log(torch.tensor(2.0))
        assert distance(mixer.read(o + r.skip, x), plain(x)) < 1e-5


def test_out_of_reach():
    """Four levels hold 2³ tokens: the ninth sees only itself."""
    torch.manual_seed(1)
    mixer, x = create("log_linear", dim=32, levels=4).double(), torch.randn(1, 9, 32, dtype=torch.float64)
    r = mixer.project(x, CallContext(x))
    o = mixer.attend(r, CallContext(x, returning=False))[:, 8]
    own = (r.q[:, 8] * r.k[:, 8]).sum(-1, keepdim=True) * r.weights[:, 8, :, :1] * r.v[:, 8]
    torch.testing.assert_close(o, own)
