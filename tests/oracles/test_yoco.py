"""The cross-decoder of YOCO: layers that attend to the first one's cache, against torch's attention, with gradients and in pieces."""

import pytest
import torch
import torch.nn.functional as F

from linattn.mixers import create
from tests.oracles.compare import assert_graded, distance


def turned(x):
    """Pairs of neighbouring channels of x [B, T, H, K] as complex numbers, times e^(i t f)."""
    frequencies = 10000.0 ** -torch.linspace(0, 1, x.shape[-1] // 2, dtype=torch.float64)
    angles = torch.arange(x.shape[1], dtype=torch.float64)[:, None] * frequencies
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)[:, None]).flatten(-2)


def layers(kv_heads):
    torch.manual_seed(kv_heads)
    return [create("yoco", dim=32, kv_heads=kv_heads, first=i == 0).double() for i in range(3)]


def ours(stack, x, states=None, **how):
    """x + layer(x), one after the other: the output and the states."""
    shared, kept = None, []
    for i, layer in enumerate(stack):
        y, state, shared = layer(x, states and states[i], shared=shared, return_shared=True, **how)
        x = x + y
        kept.append(state)
    return x, kept


def theirs(stack, x):
    first = stack[0]
    k, v = (p(x).unflatten(-1, (first.kv_heads, -1)) for p in (first.k_proj, first.v_proj))
    k = turned(k)
    for layer in stack:
        q = turned(layer.q_proj(x).unflatten(-1, (4, -1)))
        o = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True, enable_gqa=True)
        x = x + layer.o_proj(o.transpose(1, 2).flatten(-2))
    return x


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("piece", [256, 5])
def test_torch(kv_heads, piece):
    stack = layers(kv_heads)
    for layer in stack:
        layer.piece = piece
    x = torch.randn(2, 19, 32, dtype=torch.float64)
    weights = [p for layer in stack for p in layer.parameters()]
    assert_graded(lambda x: ours(stack, x)[0], lambda x: theirs(stack, x), x, weights)


@torch.no_grad()
def test_one_cache():
    """In pieces, padded and packed; only the first layer has a cache."""
    stack, x = layers(2), torch.randn(1, 19, 32, dtype=torch.float64)
    wanted, states, y = theirs(stack, x), None, []
    for piece in x.split([11, 1, 1, 6], 1):
        o, states = ours(stack, piece, states, return_state=True)
        y.append(o)
    assert distance(torch.cat(y, 1), wanted) < 1e-12
    assert [set(state) for state in states] == [{"cache", "position"}, {"position"}, {"position"}]
    mask = torch.arange(24) >= torch.tensor([[5], [0]])
    y, states = ours(stack, torch.cat([F.pad(x, (0, 0, 5, 0)), torch.randn(1, 24, 32, dtype=torch.float64)]), mask=mask, return_state=True)
    assert distance(y[:1, 5:], wanted) < 1e-12
    further = torch.randn(2, 3, 32, dtype=torch.float64)
    y, _ = ours(stack, further, states, return_state=True)
    assert distance(y[:1], theirs(stack, torch.cat([x, further[:1]], 1))[:, 19:]) < 1e-12
    packed, _ = ours(stack, torch.cat([x[:, :4], x], 1), cu_seqlens=torch.tensor([0, 4, 23]))
    assert distance(packed, torch.cat([wanted[:, :4], wanted], 1)) < 1e-12


def test_a_later_layer_needs_the_cache():
    with pytest.raises(ValueError, match="shared must be the first layer's cache"):
        create("yoco", dim=32, first=False)(torch.randn(1, 3, 32))
