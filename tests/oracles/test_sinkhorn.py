"""Sinkhorn attention: the sorting matrix against sinkhorn-transformer's operator, the attention against loops.

That package's attention is wrong without causality: it uses the sorted keys as the sorted values.
"""

import pytest
import torch

from linattn.mixers import create
from tests.oracles import standins
from tests.oracles.compare import distance


def operator():
    return standins.module(
        "sinkhorn-transformer==0.11.4",
        "sinkhorn_transformer/sinkhorn_transformer.py",
        local_attention="LocalAttention",
        axial_positional_embedding="AxialPositionalEmbedding",
        product_key_memory="PKM",
        sinkhorn_transformer__reversible="ReversibleSequence SequentialSequence",
    ).sinkhorn_sorting_operator


def blocks_of(ours, x):
    r = ours.recurrence(x, ours.begin(x))
    return [t.transpose(1, 2).unflatten(2, (-1, ours.block)) for t in (r.q, r.k, r.v)]


@pytest.mark.parametrize("sortcut", [0, 2])
def test_wheel_and_loops(sortcut):
    ours = create("sinkhorn", dim=32, heads=2, block=4, sortcut=sortcut).double()
    x = 3 * torch.randn(2, 24, 32, dtype=torch.float64)
    q, k, v = blocks_of(ours, x)  # [B, H, 6, 4, 16]
    pooled = (q.mean(3) @ k.mean(3).transpose(-1, -2) / 4).relu()
    order = operator()((pooled + 1e-6).log().flatten(0, 1) / 0.75, 7).view(2, 2, 6, 6)
    assert distance(ours.sorting(q, k, torch.ones(2, 1, 6, 4).bool()), order) < 1e-12
    out = torch.zeros_like(v)
    for b in range(2):
        for h in range(2):
            ks, vs = ([sum(order[b, h, i, j] * t[b, h, j] for j in range(6)) for i in range(6)] for t in (k, v))
            for i in range(6):
                keys = torch.cat(ks[:2] if sortcut else [k[b, h, i], ks[i]])
                values = torch.cat(vs[:2] if sortcut else [v[b, h, i], vs[i]])
                out[b, h, i] = (q[b, h, i] @ keys.T / 4).softmax(-1) @ values
    assert distance(ours(x), ours.read(out.flatten(2, 3).transpose(1, 2), x)) < 1e-12


def test_doubly_stochastic():
    ours = create("sinkhorn", dim=32, block=4, iterations=2000).double()
    x = torch.randn(2, 26, 32, dtype=torch.float64)  # the last block is of two tokens
    q, k, _ = blocks_of(ours, torch.nn.functional.pad(x, (0, 0, 0, 2)))
    real = (torch.arange(28) < 26).view(1, 1, 7, 4).expand(2, -1, -1, -1)
    order = ours.sorting(q, k, real)
    torch.testing.assert_close(order.sum(-1), torch.ones(2, 4, 7).double(), rtol=0, atol=1e-3)
    torch.testing.assert_close(order.sum(-2), torch.ones(2, 4, 7).double(), rtol=0, atol=1e-9)


def test_cold_is_a_permutation():
    """At a low temperature the sorting approaches the best permutation."""
    ours = create("sinkhorn", dim=4, heads=1, block=1, temperature=0.01, iterations=50).double()
    q, k = torch.eye(4).double().view(1, 1, 4, 1, 4), torch.eye(4).double()[[2, 0, 3, 1]].view(1, 1, 4, 1, 4)
    order = ours.sorting(q, k, torch.ones(1, 1, 4, 1).bool())[0, 0]
    torch.testing.assert_close(order, torch.eye(4).double()[[1, 3, 0, 2]])


def test_noise_in_training_alone():
    ours = create("sinkhorn", dim=32, block=4, noise=True)
    x = torch.randn(1, 24, 32)
    assert not torch.equal(ours(x), ours(x))
    ours.eval()
    assert torch.equal(ours(x), ours(x))


def test_refusals():
    with pytest.raises(ValueError, match="temperature must be above 0, but came as 0"):
        create("sinkhorn", dim=32, temperature=0)
