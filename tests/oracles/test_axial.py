"""Axial attention against axial-attention along each axis, with the same weights; the decoder by what its tokens depend on."""

import pytest
import torch

from linattn.mixers import create
from tests.oracles import standins
from tests.oracles.compare import distance


def theirs(ours):
    """Their attention along an axis with the weights of ours, for x [B, T, D]."""
    module = standins.module(
        "axial-attention==0.6.1", "axial_attention/axial_attention.py", axial_attention__reversible="ReversibleSequence"
    )
    layer = module.SelfAttention(32, heads=4).double()
    w = ours.state_dict()
    layer.load_state_dict({
        "to_q.weight": w["q_proj.weight"], "to_kv.weight": torch.cat([w["k_proj.weight"], w["v_proj.weight"]]),
        "to_out.weight": w["o_proj.weight"], "to_out.bias": torch.zeros(32, dtype=torch.float64),
    })  # fmt: skip
    return layer


@pytest.mark.parametrize(("height", "width"), [(1, 1), (3, 5), (6, 4)])
def test_wheel(height, width):
    ours = create("axial", dim=32).double()
    x = torch.randn(2, height * width, 32, dtype=torch.float64)
    grid = x.view(2, height, width, 32)
    r = theirs(ours.rows)(grid.flatten(0, 1)).view_as(grid)
    columns = theirs(ours.columns)((grid + r).transpose(1, 2).flatten(0, 1)).view(2, width, height, 32).transpose(1, 2)
    assert distance(ours(x, height, width), (r + columns).flatten(1, 2)) < 1e-12


def test_decoder():
    """A token depends on all earlier ones in the order of rows, and on no later one."""
    ours = create("axial", dim=32, causal=True).double()
    height, width = 4, 3
    x = torch.randn(1, height * width, 32, dtype=torch.float64, requires_grad=True)
    y = ours(x, height, width)
    for t in range(height * width):
        (gradient,) = torch.autograd.grad(y[0, t].sum(), x, retain_graph=True)
        heard = gradient[0].abs().amax(-1) > 0
        assert heard[: t + 1].all() and not heard[t + 1 :].any(), t
