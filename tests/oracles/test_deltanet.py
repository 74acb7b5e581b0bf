"""DeltaNet against fla-core's recurrence."""

import pytest
import torch
import torch.nn.functional as F

from linattn.mixers import CallContext, create
from tests.oracles.compare import fla, naive_distance


def naive(r):
    q, k, v, beta = (t.transpose(1, 2) for t in (r.q, r.k, r.v, r.beta))  # theirs is heads first
    return fla("delta_rule").delta_rule_recurrence(q, k, v, beta)[0].transpose(1, 2)


@pytest.mark.parametrize("negative_eigenvalues", [False, True])
def test_fla(negative_eigenvalues):
    mixer, x = create("deltanet", dim=64, negative_eigenvalues=negative_eigenvalues), 3 * torch.randn(2, 75, 64)
    assert (mixer.project(x, CallContext(x)).beta.max() > 1.5) == negative_eigenvalues
    assert naive_distance(mixer, naive, x) < 1e-5


def test_projections():
    """Convolution over the past four tokens, SiLU, unit length, sigmoid."""
    mixer, x = create("deltanet", dim=64).double(), torch.randn(1, 9, 64, dtype=torch.float64)
    r, taps = mixer.project(x, CallContext(x)), mixer.conv.weight[:, 0]  # [3D, 4], the last tap is the token itself
    u = F.pad(x @ mixer.qkv_proj.weight.T, (0, 0, 3, 0))
    mixed = F.silu(sum(u[:, i : i + 9] * taps[:, i] for i in range(4)))
    q, k, v = (t.view(1, 9, 4, 16) for t in mixed.chunk(3, -1))
    torch.testing.assert_close(r.q, q / (q.square().sum(-1, keepdim=True) + 1e-6).sqrt())
    torch.testing.assert_close(r.k, k / (k.square().sum(-1, keepdim=True) + 1e-6).sqrt())
    torch.testing.assert_close(r.v, v)
    torch.testing.assert_close(r.beta, torch.sigmoid(x @ mixer.b_proj.weight.T))
