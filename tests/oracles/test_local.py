"""Local attention against local-attention, whose blocks look one back (and, without causality, one ahead), and against loops."""

import pytest
import torch
from einops import rearrange

from linattn.mixers import create
from tests.oracles import standins, wheels
from tests.oracles.compare import distance
from tests.oracles.patterns import assert_pattern, drawn


@pytest.fixture(scope="module")
def theirs():
    wheels.path("local-attention==1.11.2")
    return standins.module(
        "local-attention==1.11.2",
        "local_attention/local_attention.py",
        hyper_connections__mhc="HyperConnections",
        local_attention__rotary="SinusoidalEmbeddings apply_rotary_pos_emb",
    ).LocalAttention


@pytest.mark.parametrize("causal", [True, False])
def test_local_attention(theirs, causal):
    ours = create("local", dim=32, heads=2, block=8, memory=8, causal=causal, rotary=False).double()
    layer = theirs(window_size=8, causal=causal, look_backward=1, autopad=False, dropout=0.0, use_rotary_pos_emb=False)
    x = torch.randn(2, 48, 32, dtype=torch.float64)
    r = ours.recurrence(x, ours.begin(x))
    q, k, v = (rearrange(t, "b t h d -> (b h) t d") for t in (r.q, r.k, r.v))
    wanted = ours.read(rearrange(layer(q, k, v), "(b h) t d -> b t h d", b=2), x)
    assert distance(ours(x), wanted) < 1e-12


@pytest.mark.parametrize("length", [1, 7, 8, 50])
@pytest.mark.parametrize(("block", "memory", "causal"), [(8, 3, True), (8, 12, True), (5, 0, True), (8, 3, False), (4, 9, False)])
def test_loops(length, block, memory, causal):
    """Section 3.2: the memory block is the query block and m positions before it; rotary positions as in all patterns."""
    ours = create("local", dim=32, block=block, memory=memory, causal=causal).double()

    def sees(i, j):
        start = i // block * block
        return start - memory <= j <= (i if causal else start + block - 1 + memory)

    assert_pattern(ours, torch.randn(2, length, 32, dtype=torch.float64), drawn(length, sees)[None])


def test_refusals():
    with pytest.raises(ValueError, match="size must be an integer of at least 1, but came as 0"):
        create("local", dim=32, block=0)
    with pytest.raises(ValueError, match="before must be an integer of at least 0, but came as -1"):
        create("local", dim=32, memory=-1)
