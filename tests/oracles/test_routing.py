"""Routing attention against routing-transformer's KmeansAttention with the same centres, and its k-means step by hand."""

import pytest
import torch
import torch.nn.functional as F

from linattn.mixers import create
from tests.oracles import standins
from tests.oracles.compare import distance


@pytest.mark.parametrize("length", [20, 48])
@pytest.mark.parametrize("clusters", [2, 5])
def test_wheel(length, clusters):
    module = standins.module(
        "routing-transformer==1.6.1",
        "routing_transformer/routing_transformer.py",
        local_attention="LocalAttention",
        product_key_memory="PKM",
        mixture_of_experts="MoE",
        routing_transformer__reversible="ReversibleSequence SequentialSequence",
    )
    ours = create("routing", dim=32, clusters=clusters, least=1).double()
    theirs = module.KmeansAttention(clusters, -(-length // clusters), 4, 8).double().eval()
    theirs.kmeans.means.copy_(ours.centres)
    theirs.kmeans.initted.fill_(True)
    x = torch.randn(2, length, 32, dtype=torch.float64, requires_grad=True)
    r = ours.recurrence(x, ours.begin(x))
    o, _ = theirs(*(t.transpose(1, 2) for t in (r.q, r.k, r.v)))
    y, wanted = ours(x), ours.read(o.transpose(1, 2), x)
    assert distance(y, wanted) < 1e-12
    weight = torch.randn_like(y)
    assert distance(*(torch.autograd.grad((t * weight).sum(), x, retain_graph=True)[0] for t in (y, wanted))) < 1e-12


def test_one_cluster_of_all_is_softmax():
    ours, softmax = (
        create(name, dim=32, **o).double() for name, o in (("routing", {"clusters": 1}), ("softmax", {"causal": False, "rotated": 0}))
    )
    softmax.load_state_dict({n: t for n, t in ours.state_dict().items() if n != "centres"})
    x = torch.randn(2, 20, 32, dtype=torch.float64)
    assert distance(ours(x), softmax(x)) < 1e-4  # an output is divided by its number, 1, + 1e-5


def test_learn():
    """Centres move to the means of their nearest tokens; empty ones stay."""
    ours = create("routing", dim=8, heads=1, clusters=3).double()
    x = torch.randn(2, 9, 8, dtype=torch.float64)
    before = ours.centres[0].clone()
    t = F.normalize(torch.cat([ours.q_proj(x), ours.k_proj(x)], 1).flatten(0, 1), dim=-1)
    nearest = (t @ before.T).argmax(-1)
    wanted = torch.stack([F.normalize(t[nearest == c].sum(0), dim=-1) if (nearest == c).any() else before[c] for c in range(3)])
    ours.learn(x, decay=0.75)
    assert distance(ours.centres[0], 0.75 * before + 0.25 * wanted) < 1e-12


def test_refusals():
    with pytest.raises(ValueError, match="clusters must be at least 1, but came as 0"):
        create("routing", dim=32, clusters=0)
