"""VAN's large kernel attention against the paper's equations place by place, and against figures of the authors' code."""

import torch
import torch.nn.functional as F

from linattn.mixers import create
from tests.oracles.images import assert_figures, assert_loop, convolved, shaken, tokens

VALUES = [0.938776684343, -1.80461891646, 0.781486829826, -2.36095742532, 3.97001864272, -0.830275655374, 1.48060641761, -0.706573479038]
GRADIENTS = [-0.884556211262, 3.41781166626, -5.13447235696, 20.1363376588, 33.1185562774, 7.72671179915, 17.9159650411, -3.19937533186]


def with_holes(weight, rate):
    """A dilated kernel [C, 1, k, k] with ``rate`` as a dense one."""
    side = rate * (weight.shape[-1] - 1) + 1
    wide = weight.new_zeros(*weight.shape[:2], side, side)
    wide[..., ::rate, ::rate] = weight
    return wide


def loop(mixer, x, height, width):
    """Equation 3 of arXiv 2202.09741 between two pointwise maps, plus the tokens."""
    gate, rows = mixer.spatial_gating_unit, []
    for image in x:
        u = F.gelu(image @ mixer.proj_1.weight[..., 0, 0].T + mixer.proj_1.bias)
        near = convolved(u.view(height, width, -1), gate.conv0.weight, gate.conv0.bias)
        far = convolved(near, with_holes(gate.conv_spatial.weight, 3), gate.conv_spatial.bias).flatten(0, 1)
        attention = far @ gate.conv1.weight[..., 0, 0].T + gate.conv1.bias
        rows.append(image + (u * attention) @ mixer.proj_2.weight[..., 0, 0].T + mixer.proj_2.bias)
    return torch.stack(rows)


def test_the_equations_place_by_place():
    mixer = shaken(create("van", dim=8))
    x = torch.randn(2, 35, 8, dtype=torch.float64, requires_grad=True)
    assert_loop(mixer, x, (5, 7), loop(mixer, x, 5, 7))


def test_figures_of_the_authors_code():
    assert_figures(create("van", dim=16), tokens(5, 5, 16), 5, VALUES, GRADIENTS)


def test_reach():
    """A place depends on those up to 11 rows and columns away, including the corners of 23 x 23, and on no others."""
    mixer, x = create("van", dim=4).double(), torch.randn(1, 27 * 27, 4, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(mixer(x, 27, 27)[0, 13 * 27 + 13].sum(), x)
    heard = (gradient[0].abs().sum(-1) > 0).view(27, 27)
    wanted = torch.zeros(27, 27, dtype=torch.bool)
    wanted[2:25, 2:25] = True
    assert torch.equal(heard, wanted)
