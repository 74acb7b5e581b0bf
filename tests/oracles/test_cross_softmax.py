"""Softmax attention to a context against torch's MultiheadAttention with the same weights."""

import pytest
import torch
from torch import nn

from linattn.mixers import create
from tests.oracles.compare import distance


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("padded", [True, False])
def test_values_and_gradients(bias, padded):
    ours, theirs = (
        create("cross_softmax", dim=32, heads=4, bias=bias).double(),
        nn.MultiheadAttention(32, 4, bias=bias, batch_first=True).double(),
    )
    with torch.no_grad():
        theirs.in_proj_weight.copy_(torch.cat([p.weight for p in (ours.q_proj, ours.k_proj, ours.v_proj)]))
        theirs.out_proj.weight.copy_(ours.o_proj.weight)
        if bias:
            theirs.in_proj_bias.copy_(torch.cat([p.bias for p in (ours.q_proj, ours.k_proj, ours.v_proj)]))
            theirs.out_proj.bias.copy_(ours.o_proj.bias)
    x, context = (torch.randn(3, n, 32, dtype=torch.float64, requires_grad=True) for n in (5, 9))
    mask = torch.rand(3, 9) < 0.6 if padded else None
    y = ours(x, context, context_mask=mask)
    wanted, _ = theirs(x, context, context, key_padding_mask=None if mask is None else ~mask)
    g = torch.randn_like(y)
    assert distance(y, wanted) < 1e-12
    for got, expected in zip(*(torch.autograd.grad(t, [x, context], g) for t in (y, wanted)), strict=True):
        assert distance(got, expected) < 1e-12


def test_a_context_of_nothing_but_padding_gives_nothing():
    mixer, x = create("cross_softmax", dim=32), torch.randn(2, 5, 32, requires_grad=True)
    context = torch.randn(2, 4, 32, requires_grad=True)
    y = mixer(x, context, context_mask=torch.tensor([[True] * 4, [False] * 4]))
    assert y[0].any() and not y[1].any()
    assert all(g.isfinite().all() for g in torch.autograd.grad(y.sum(), [x, context]))
    assert not mixer(x, context[:, :0]).any()
