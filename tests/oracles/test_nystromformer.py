"""Nyströmformer against transformers' layer with the same weights and, where its segments are not equal, against loops."""

import pytest
import torch

from linattn.mixers import create
from linattn.mixers.memory.nystromformer import inverse
from tests.oracles.compare import assert_graded, distance

pytest.importorskip("transformers")


def both(landmarks, length, heads=4):
    """Our layer and theirs with the same parameters. An attribute makes theirs initialise the inverse of each row and head by its own norm;
    the config's option fails on a wrong key."""
    from transformers.models.nystromformer.modeling_nystromformer import NystromformerConfig, NystromformerSelfAttention

    config = NystromformerConfig(
        hidden_size=32, num_attention_heads=heads, num_landmarks=landmarks, segment_means_seq_len=length, conv_kernel_size=5,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    theirs = NystromformerSelfAttention(config).double()
    theirs.init_option = "exact"
    ours = create("nystromformer", dim=32, heads=heads, landmarks=landmarks, kernel_size=5).double()
    for a, b in (("q_proj", "query"), ("k_proj", "key"), ("v_proj", "value"), ("conv", "conv")):
        setattr(ours, a, getattr(theirs, b))
    with torch.no_grad():
        ours.o_proj.weight.copy_(torch.eye(32)), ours.o_proj.bias.zero_()
    return ours, theirs


@pytest.mark.parametrize(("landmarks", "length"), [(4, 24), (1, 6), (8, 16)])
def test_transformers(landmarks, length):
    ours, theirs = both(landmarks, length)
    x = 3 * torch.randn(2, length, 32, dtype=torch.float64)
    assert_graded(ours, lambda x: theirs(x)[0], x, list(theirs.parameters()))


def test_theirs_hears_of_the_batch():
    """By default theirs uses the norm of the whole batch, so that rows depend on each other; ours does not."""
    ours, theirs = both(4, 24)
    theirs.init_option = "original"
    x = 3 * torch.randn(2, 24, 32, dtype=torch.float64)
    assert distance(theirs(x)[0][:1], theirs(x[:1])[0]) > 1e-7
    assert distance(ours(x)[:1], ours(x[:1])) < 1e-12


@pytest.mark.parametrize("length", [1, 3, 5, 7, 23])
def test_loop(length):
    """The paper's equations with m = 5 segments, tokens t to ⌊5 t / n⌋, or one for each token."""
    ours = create("nystromformer", dim=8, heads=1, landmarks=5, kernel_size=3).double()
    x = torch.randn(1, length, 8, dtype=torch.float64)
    q, k, v = (p(x)[0] for p in (ours.q_proj, ours.k_proj, ours.v_proj))
    q, k, m = q * 8**-0.25, k * 8**-0.25, min(5, length)
    members = [[t for t in range(length) if t * m // length == i] for i in range(m)]
    assert {len(s) for s in members} <= {length // m, -(-length // m)}
    landmarks_q, landmarks_k = (torch.stack([t[s].mean(0) for s in members]) for t in (q, k))
    a = (landmarks_q @ landmarks_k.T).softmax(-1)
    z = a.T / (a.sum(0).max() * a.sum(1).max())
    one = torch.eye(m, dtype=torch.float64)
    for _ in range(6):
        z = z @ (13 * one - a @ z @ (15 * one - a @ z @ (7 * one - a @ z))) / 4
    w = ours.conv.weight[0, 0, :, 0]
    local = [sum(w[j] * v[t + j - 1] for j in range(3) if 0 <= t + j - 1 < length) for t in range(length)]
    o = (q @ landmarks_k.T).softmax(-1) @ z @ (landmarks_q @ k.T).softmax(-1) @ v + torch.stack(local)
    assert distance(ours(x)[0], ours.o_proj(o)) < 1e-12


def test_the_inverse():
    a = torch.randn(3, 6, 6, dtype=torch.float64).softmax(-1) + torch.eye(6)
    assert distance(inverse(a, 30), torch.linalg.pinv(a)) < 1e-12
    a[:, 4:], a[:, :, 4:] = 0, 0
    assert distance(inverse(a, 30), torch.linalg.pinv(a)) < 1e-12


def test_a_landmark_for_each_token_is_softmax():
    ours = create("nystromformer", dim=32, iterations=30, kernel_size=0, bias=False).double()
    softmax = create("softmax", dim=32, causal=False, rotated=0).double()
    softmax.load_state_dict(ours.state_dict())
    x = 3 * torch.randn(2, 6, 32, dtype=torch.float64)
    assert distance(ours(x), softmax(x)) < 1e-9


def test_refusals():
    with pytest.raises(ValueError, match="landmarks must be at least 1, but came as 0"):
        create("nystromformer", dim=32, landmarks=0)
    with pytest.raises(ValueError, match="kernel_size must be odd, or 0 for no convolution, but came as 4"):
        create("nystromformer", dim=32, kernel_size=4)
