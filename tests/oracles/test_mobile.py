"""Mobile Attention against the authors' equations token by token, and against figures of their code."""

import torch

from linattn.mixers import create
from tests.oracles.compare import distance
from tests.oracles.images import assert_figures, shaken, tokens
from tests.oracles.similarity import assert_bidirectional

VALUES = [-4.41820334578, 4.35114375301, -1.64605751198, -0.430551752683, -4.69423292372, 4.29502228704, -1.520396595, -0.205802122902]
GRADIENTS = [40.9709856121, -9.58582309325, 69.2963761369, 6.37389420683, 24.8017910863, 15.4410904069, 85.6880492415, -29.3124587004]


def loop(mixer, x):
    """Head by head and token by token: sinks are queries, sources are keys."""
    q, k, v = (p(x).unflatten(-1, (mixer.heads, -1)) for p in (mixer.query_projection, mixer.key_projection, mixer.value_projection))
    q, k, heads, n, rows = q.sigmoid(), k.sigmoid(), range(mixer.heads), x.shape[1], []
    for q, k, v in zip(q, k, v, strict=True):  # [T, H, K]
        into, out_of, gate, offered = (torch.zeros(n, mixer.heads, dtype=x.dtype) for _ in range(4))
        for t in range(n):
            for h in heads:
                into[t, h] = 1 / ((q[t, h] + 1e-6) * (sum(k[t, g] for g in heads) + 1e-6)).sum()
                out_of[t, h] = 1 / ((k[t, h] + 1e-6) * (sum(q[t, g] for g in heads) + 1e-6)).sum()
        for t in range(n):
            for h in heads:
                gate[t, h] = ((q[t, h] + 1e-6) * (sum(k[t, g] * out_of[t, g] for g in heads) + 1e-6)).sum().sigmoid()
                offered[t, h] = ((k[t, h] + 1e-6) * (sum(q[t, g] * into[t, g] for g in heads) + 1e-6)).sum().clamp(-1, 1)
        share = offered.softmax(0) * n
        o = [
            [sum((q[t, h] @ k[i, h]) * share[i, h] * v[i, h] for i in range(n)) * into[t, h] * gate[t, h] for h in heads] for t in range(n)
        ]
        rows.append(mixer.out_projection(torch.stack([torch.cat(token) for token in o])))
    return torch.stack(rows)


def test_the_equations_token_by_token():
    mixer, x = shaken(create("mobile", dim=16, heads=4)), torch.randn(2, 9, 16, dtype=torch.float64, requires_grad=True)
    y, wanted, g = mixer(x), loop(mixer, x), torch.randn(2, 9, 16, dtype=torch.float64)
    assert distance(y, wanted) < 1e-12
    got, expected = (torch.autograd.grad(t, [x, *mixer.parameters()], g) for t in (y, wanted))
    assert all(distance(a, b) < 1e-10 for a, b in zip(got, expected, strict=True))


def test_figures_of_the_authors_code():
    assert_figures(create("mobile", dim=16, heads=4), tokens(5, 5, 16), 5, VALUES, GRADIENTS)


def test_bidirectional():
    assert_bidirectional(create("mobile", dim=64).double(), torch.randn(2, 41, 64, dtype=torch.float64))


def test_the_order_of_the_tokens_means_nothing():
    mixer, x = create("mobile", dim=32).double(), torch.randn(2, 30, 32, dtype=torch.float64)
    order = torch.randperm(30)
    assert distance(mixer(x[:, order]), mixer(x)[:, order]) < 1e-12
