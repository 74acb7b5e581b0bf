"""Clustered attention against loops over hashes, Hamming distances, clusters and keys, and in its limits against softmax.

idiap/fast-transformers does the clustering in C++ that must be compiled (hash_cpu.cpp, cluster_cpu.cpp); the loops follow it: a bit is
q · plane > offset, the nearest centre is the first of several, a centre's bit is that of most of its hashes (0 if they are even),
nine times, then a last assignment. One difference is intended: an empty centre stays, while theirs is drawn anew.
"""

import pytest
import torch

from linattn.mixers import create
from tests.oracles.compare import distance

NAMES = ("clustered", "improved_clustered")


def clusters_of(ours, q):
    """The cluster of each query of q [T, K]."""
    codes = [[bool(t @ plane > offset) for plane, offset in zip(ours.planes.T, ours.offsets, strict=True)] for t in q]
    centres = codes[: ours.clusters]

    def assign():
        return [min(range(len(centres)), key=lambda c: (sum(a != b for a, b in zip(code, centres[c], strict=True)), c)) for code in codes]

    for _ in range(ours.iterations - 1):
        clusters = assign()
        for c in range(len(centres)):
            own = [code for code, n in zip(codes, clusters, strict=True) if n == c]
            if own:
                centres[c] = [sum(1 if code[bit] else -1 for code in own) > 0 for bit in range(len(own[0]))]
    return assign()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("length", "count"), [(1, 3), (9, 4), (23, 3)])
def test_loops(name, length, count):
    options = {"top": 4} if name == "improved_clustered" else {}
    ours = create(name, dim=16, heads=2, clusters=count, iterations=4, bits=6, **options).double()
    x = 2 * torch.randn(1, length, 16, dtype=torch.float64)
    r = ours.recurrence(x, ours.begin(x))
    out = torch.zeros(length, 2, 8, dtype=torch.float64)
    for h in range(2):
        q, k, v = (t[0, :, h] for t in (r.q, r.k, r.v))
        cluster = clusters_of(ours, q)
        for t in range(length):
            mean = torch.stack([q[i] for i in range(length) if cluster[i] == cluster[t]]).mean(0)
            weights = (k @ mean / 8**0.5).softmax(0)
            if options:
                best = sorted(range(length), key=lambda i: -weights[i])[:4]
                near = (k[best] @ q[t] / 8**0.5).softmax(0) * weights[best].sum()
                weights = weights.clone()
                weights[best] = near
            out[t, h] = weights @ v
    assert distance(ours(x), ours.read(out[None], x)) < 1e-12


@pytest.mark.parametrize(("name", "options"), [("clustered", {"clusters": 40}), ("improved_clustered", {"clusters": 3, "top": 40})])
def test_softmax_is_the_limit(name, options):
    """One query per cluster, or all keys in the top ones; with gradients."""
    ours, softmax = create(name, dim=32, **options).double(), create("softmax", dim=32, causal=False, rotated=0).double()
    softmax.load_state_dict({n: t for n, t in ours.state_dict().items() if n.endswith("weight")})
    x = torch.randn(2, 40, 32, dtype=torch.float64, requires_grad=True)
    y, wanted = ours(x), softmax(x)
    assert distance(y, wanted) < 1e-12
    weight = torch.randn_like(y)
    assert distance(*(torch.autograd.grad((t * weight).sum(), x)[0] for t in (y, wanted))) < 1e-12


def test_refusals():
    with pytest.raises(ValueError, match="clusters must be at least 1, but came as 0"):
        create("clustered", dim=32, clusters=0)
    with pytest.raises(ValueError, match="top must be at least 1, but came as 0"):
        create("improved_clustered", dim=32, top=0)
