"""A step of CA-Stream against its equation as a loop, and against figures of the authors' code."""

import pytest
import torch

from linattn import mixing_matrix
from linattn.mixers import create
from tests.oracles.compare import distance
from tests.oracles.images import shaken, tokens, waved

# of the authors' CLS_Attention with a class token 0.3 tokens(1, 1, 16) and features tokens(5, 6, 16): every fifth value,
# and every hundredth of the gradient of the sum of cubes with respect to the features
FIGURES = {
    1: ([1.34113883624, 1.41085652799, 1.24877826037, 0.958657238581, 1.14393172985, 1.37796069552, 1.39413612591],
        [0.498961311242, 0.00185075326185, 0.195860911069, -0.00852383046788, 0.0402130050578, -0.00909951793384, -0.0122229887663,
         0.0245943203908, -0.177208930628, -0.0033396797683]),
    2: ([0.952205330408, 1.0214809525, 0.859575237114, 0.57024480866, 0.710564348126, 0.935152046199, 0.94258645969],
        [0.214146552729, -0.00447993200053, 0.0828624293085, 0.00108719112189, 0.0372950753286, -0.0118036486331, -0.0472599185886,
         0.0613740788235, -0.0405201178391, -0.00624233613706]),
}  # fmt: skip


@pytest.mark.parametrize("heads", [1, 2])
def test_figures_of_the_authors_code(heads):
    values, gradients = (torch.tensor(t, dtype=torch.float64) for t in FIGURES[heads])
    mixer = waved(create("ca_stream", dim=16, heads=heads))
    token, features = 0.3 * tokens(1, 1, 16), tokens(5, 6, 16).requires_grad_()
    y = mixer(token, features)
    (gradient,) = torch.autograd.grad(y.pow(3).sum(), features)
    assert distance(y.flatten()[::5], values) < 1e-9
    assert distance(gradient.flatten()[::100], gradients) < 1e-9


def loop(mixer, x, context):
    rows = []
    for queries, features in zip(x, context, strict=True):
        for q in queries:
            heads = []
            for a, f in zip(q.chunk(mixer.heads), features.chunk(mixer.heads, -1), strict=True):
                weights = torch.stack([(a @ j / len(a) ** 0.5).exp() for j in f])
                heads.append(sum(w * j for w, j in zip(weights / weights.sum(), f, strict=True)))
            rows.append(mixer.proj(torch.cat(heads)))
    return torch.stack(rows).view_as(x)


@pytest.mark.parametrize("heads", [1, 4])
def test_loop(heads):
    torch.manual_seed(0)
    mixer = shaken(create("ca_stream", dim=16, heads=heads))
    x, context = (torch.randn(2, n, 16, dtype=torch.float64, requires_grad=True) for n in (3, 7))
    y, wanted = mixer(x, context), loop(mixer, x, context)
    assert distance(y, wanted) < 1e-12
    got, expected = (torch.autograd.grad(t.square().sum(), [x, context, *mixer.parameters()]) for t in (y, wanted))
    assert all(distance(a, b) < 1e-11 for a, b in zip(got, expected, strict=True))


def test_a_class_token_of_zeros_takes_the_mean():
    """The paper's starting point: uniform attention is global average pooling."""
    mixer, features = create("ca_stream", dim=16).double(), torch.randn(2, 7, 16, dtype=torch.float64)
    token = torch.zeros(2, 1, 16, dtype=torch.float64)
    assert distance(mixer(token, features), mixer.proj(features.mean(1, keepdim=True))) < 1e-12
    assert distance(mixing_matrix(mixer, token, features), torch.full((2, 1, 1, 7), 1 / 7).double()) < 1e-7


def test_gradients_of_scores_of_1e9():
    """Weights of 0 and 1, so that gradients are finite; fused attention makes NaN of these."""
    mixer = create("ca_stream", dim=32)
    x = (1e4 * torch.randn(1, 200, 32)).requires_grad_()
    y = mixer(x, x)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert y.isfinite().all() and gradient.isfinite().all()
