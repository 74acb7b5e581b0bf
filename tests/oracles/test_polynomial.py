"""The polynomial kernel against fla-core's square of dot products, of queries and keys with one constant channel more."""

import pytest
import torch
import torch.nn.functional as F

from linattn.mixers import create
from tests.oracles.compare import distance, fla
from tests.oracles.similarity import assert_bidirectional, assert_forms, merged, projected, quadratic


@pytest.mark.parametrize("constant", [1.0, 0.25])
def test_fla(constant):
    mixer, x = create("polynomial", dim=64, constant=constant).double(), 2 * torch.randn(2, 75, 64, dtype=torch.float64)
    q, k, v = projected(mixer, x)
    q, k = F.pad(q / 4, (0, 1), value=constant), F.pad(k, (0, 1), value=1.0)  # 4 = √16
    wanted = fla("rebased").naive_parallel_rebased(q, k, v, scale=1.0)
    assert distance(mixer(x), merged(mixer, wanted)) < 1e-9
    assert_forms(mixer, x)


def test_bidirectional():
    mixer, x = create("polynomial", dim=64, causal=False).double(), 2 * torch.randn(2, 41, 64, dtype=torch.float64)
    q, k, v = projected(mixer, x)
    assert distance(mixer(x), quadratic(mixer, (q @ k.mT / 4 + 1) ** 2, v, lambda z: z + 1e-6)) < 1e-9
    assert_bidirectional(mixer, x)


def test_bad_options_are_refused():
    with pytest.raises(ValueError, match="constant must be at least 0"):
        create("polynomial", dim=32, constant=-1.0)
    with pytest.raises(ValueError, match="feature_dim must be at least 1"):
        create("polynomial", dim=32, feature_dim=0)
