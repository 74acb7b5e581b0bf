"""Cluster-Former against the mask of equal clusters, drawn with loops: no public code of it was found."""

import pytest
import torch

from linattn.mixers import create
from tests.oracles.patterns import assert_pattern, drawn


@pytest.mark.parametrize("length", [1, 9, 40])
def test_loops(length):
    ours = create("cluster_former", dim=32, clusters=3).double()
    x = 2 * torch.randn(1, length, 32, dtype=torch.float64)
    cluster = [min(range(3), key=lambda c: (t - ours.centres[c]).norm().item()) for t in x[0]]
    assert length == 1 or len(set(cluster)) > 1
    assert_pattern(ours, x, drawn(length, lambda i, j: cluster[i] == cluster[j])[None])


def test_large_clusters_fall_into_chunks():
    ours = create("cluster_former", dim=32, clusters=1, chunk=5).double()
    x = torch.randn(1, 13, 32, dtype=torch.float64)
    assert_pattern(ours, x, drawn(13, lambda i, j: i // 5 == j // 5)[None])


def test_refresh_is_kmeans():
    """Two clusters and two centres: each converges to one mean; a third, distant centre stays."""
    ours = create("cluster_former", dim=4, heads=1, clusters=3, rotary=False).double()
    heaps = torch.tensor([[10.0, 0, 0, 0], [0, 10.0, 0, 0]], dtype=torch.float64)
    x = heaps.repeat_interleave(20, 0) + 0.1 * torch.randn(40, 4, dtype=torch.float64)
    ours.centres.copy_(torch.tensor([[9.0, 1, 0, 0], [1, 9.0, 0, 0], [0, 0, 0, -99.0]]))
    ours.refresh(x)
    torch.testing.assert_close(ours.centres[:2], x.view(2, 20, 4).mean(1))
    assert ours.centres[2].tolist() == [0, 0, 0, -99]


def test_refusals():
    with pytest.raises(ValueError, match="chunk must be at least 1, but came as 0"):
        create("cluster_former", dim=32, chunk=0)
