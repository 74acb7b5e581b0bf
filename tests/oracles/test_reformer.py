"""Reformer against transformers' LSHSelfAttention with the same weights and rotations; the causal form against loops."""

import pytest
import torch

from linattn.mixers import create
from tests.oracles.compare import distance

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize(("length", "rounds"), [(8, 1), (8, 3), (16, 1), (64, 1), (64, 2), (96, 4)])
def test_transformers(length, rounds):
    from transformers.models.reformer.modeling_reformer import LSHSelfAttention, ReformerConfig

    config = ReformerConfig(
        hidden_size=32, num_attention_heads=4, attention_head_size=8, lsh_attn_chunk_length=8, num_buckets=6, num_hashes=rounds,
        hash_seed=5, is_decoder=False, lsh_attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    theirs = LSHSelfAttention(config, 0).double().eval()
    ours = create("reformer", dim=32, chunk=8, buckets=6, rounds=rounds, causal=False).double()
    torch.manual_seed(5)
    with torch.no_grad():
        ours.rotations.copy_(torch.randn(ours.rotations.shape, dtype=torch.float64))
        ours.qk_proj.weight.copy_(theirs.query_key.weight)
        ours.v_proj.weight.copy_(theirs.value.weight)
        ours.o_proj.weight.copy_(torch.eye(32))
    x = torch.randn(2, length, 32, dtype=torch.float64, requires_grad=True)
    y, wanted = ours(x), theirs(x).hidden_states
    assert distance(y, wanted) < 1e-9
    weight = torch.randn_like(y)
    gradients = [torch.autograd.grad((t * weight).sum(), x)[0] for t in (y, wanted)]
    assert distance(*gradients) < 1e-9


@pytest.mark.parametrize("length", [1, 5, 40])
def test_causal_loops(length):
    ours = create("reformer", dim=32, heads=2, chunk=3, buckets=4, rounds=2).double()
    x = torch.randn(1, length, 32, dtype=torch.float64)
    r = ours.recurrence(x, ours.begin(x))
    bucket, out = ours.hashed(r.q)[0], torch.zeros(length, 2, 16, dtype=torch.float64)
    for h in range(2):
        for t in range(length):
            weights, values = [], []
            for n in range(2):
                alike = [i for i in range(t + 1) if bucket[i, h, n] == bucket[t, h, n]]
                rank = {i: place // 3 for place, i in enumerate(alike)}
                near = [i for i in alike if rank[t] - rank[i] <= 1 and i != t] or [t]
                for i in near:
                    score = r.q[0, t, h] @ r.k[0, i, h] if i != t else torch.tensor(-1e5)
                    weights.append(score.double())
                    values.append(r.v[0, i, h])
            out[t, h] = torch.stack(weights).softmax(0) @ torch.stack(values)
    assert distance(ours(x), ours.read(out[None], x)) < 1e-12


def test_no_tokens_after_no_tokens():
    """A call without tokens goes on from a state that has seen none."""
    ours, x = create("reformer", dim=32), torch.randn(2, 3, 32)
    _, state = ours(x[:, :0], return_state=True)
    y, state = ours(x[:, :0], state, return_state=True)
    assert y.shape == (2, 0, 32)
    assert distance(ours(x, state), ours(x)) < 1e-6


def test_redraw():
    ours = create("reformer", dim=32)
    before = ours.rotations.clone()
    ours.redraw(torch.Generator().manual_seed(1))
    assert not torch.equal(before, ours.rotations)


def test_refusals():
    with pytest.raises(ValueError, match="buckets must be an even number of at least 2, but came as 5"):
        create("reformer", dim=32, buckets=5)
    with pytest.raises(ValueError, match="chunk must be at least 1, but came as 0"):
        create("reformer", dim=32, chunk=0)
