"""Linear attention to a context against the quadratic formulas in float64, and against figures of the authors' code."""

import math

import pytest
import torch
import torch.nn.functional as F

from linattn.mixers import create
from tests.oracles.compare import distance
from tests.oracles.images import tokens, waved
from tests.oracles.similarity import merged

# Every twentieth of what fairseq's fork by the authors of modular linearized attention (commit 1d291d65, run in float64) gives, of the
# gradient of Σ y³ to the tokens, and of that to the context. Their cosFormer reads the target token by token, from its cache.
FIGURES = {
    "cross_cosformer": (
        [
            -1.19166345409, 0.925897415243, -0.106859786416, 0.285434648857, -1.32954229536, 0.979328192634, -0.186788154232,
            0.329332190989,
        ],
        [
            1.42786923524, 0.317058234121, -0.451025824058, 0.0415354304839, 0.201536833554, 0.340010065009, -1.90051935407,
            0.163495126559,
        ],
        [
            0.246600591485, 1.34462115186, 1.02093474532, 2.01716958284, 0.0944056096306, 1.11682298634, -0.153093116319,
            -0.470975636346, -0.617030237169, 1.13689115516, 0.77603845301, 0.150892940905,
        ],
    ),
    "cross_relu_attention": (
        [
            -1.19251411175, 0.917161486889, -0.0840212198156, 0.303168859171, -1.31918822934, 0.98227671505, -0.208341842141,
            0.363295795949,
        ],
        [
            1.40078188552, 0.356022039921, -0.313494614291, 0.0406651603491, 0.35123572165, 0.295881808379, -1.94842944928,
            0.174532190788,
        ],
        [
            0.0196938938949, 1.15746551166, 0.971262680446, 1.84677972684, 0.300314926682, 1.45706878758, -0.32559421484,
            -0.518873254676, -0.598315247478, 0.949874966819, 0.928799018996, 0.292923451619,
        ],
    ),
}  # fmt: skip


def similarities(mixer, q, k):
    """By the papers' equations, [B, H, Tq, T]; q and k are [B, H, T, K]."""
    name = mixer.info.name
    if name == "cross_linear_transformer":
        return (F.elu(q) + 1) @ (F.elu(k) + 1).mT
    s = q.relu() @ k.relu().mT
    if name == "cross_relu_attention":
        return s
    n, i = k.shape[2], torch.arange(1, k.shape[2] + 1, dtype=torch.float64)
    t = torch.arange(1, q.shape[2] + 1, dtype=torch.float64) / (mixer.ratio * n)
    return s * torch.cos(math.pi / 2 * (t.clamp(max=1.0)[:, None] - i / n))


@pytest.mark.parametrize("name", ["cross_cosformer", "cross_relu_attention", "cross_linear_transformer"])
def test_quadratic_formula(name):
    options = {"ratio": 0.7} if name == "cross_cosformer" else {}  # 7 of 11 tokens, so that the last ones are beyond the estimate
    mixer = create(name, dim=32, heads=2, **options).double()
    x, context = (torch.randn(2, n, 32, dtype=torch.float64, requires_grad=True) for n in (11, 10))
    maps = ((mixer.q_proj, x), (mixer.k_proj, context), (mixer.v_proj, context))
    q, k, v = (project(t).unflatten(-1, (2, -1)).transpose(1, 2) for project, t in maps)
    s = similarities(mixer, q, k)
    total = s.sum(-1, keepdim=True)
    wanted = merged(mixer, s @ v / (total + 1e-6 if name == "cross_linear_transformer" else total.clamp(min=0.1)))
    y, g = mixer(x, context), torch.randn(2, 11, 32, dtype=torch.float64)
    assert distance(y, wanted) < 1e-12
    got, expected = (torch.autograd.grad(t, [x, context, *mixer.parameters()], g) for t in (y, wanted))
    assert all(distance(a, b) < 1e-10 for a, b in zip(got, expected, strict=True))
    assert name != "cross_cosformer" or (s >= 0).all(), "no weight is negative beyond the estimate"


@pytest.mark.parametrize("name", FIGURES)
def test_figures_of_the_authors_code(name):
    mixer = waved(create(name, dim=16, heads=4, **({"ratio": 0.9} if name == "cross_cosformer" else {})))
    x, context = (t.requires_grad_() for t in (tokens(1, 5, 16), tokens(1, 7, 16).flip(1)))
    y = mixer(x, context)
    for got, wanted in zip((y, *torch.autograd.grad(y.pow(3).sum(), (x, context))), FIGURES[name], strict=True):
        assert distance(got.flatten()[::20], torch.tensor(wanted, dtype=torch.float64)) < 1e-9


def test_the_estimate_is_of_the_real_tokens():
    """Padding of the context does not lengthen the estimate, and a target in pieces keeps its positions."""
    mixer, x, context = create("cross_cosformer", dim=32).double(), torch.randn(1, 6, 32).double(), torch.randn(1, 9, 32).double()
    mask = torch.arange(9)[None] < 5
    y = mixer(x, context, context_mask=mask)
    assert distance(y, mixer(x, context[:, :5])) < 1e-12
    first, state = mixer(x[:, :2], context, context_mask=mask, return_state=True)
    assert state["length"].tolist() == [5]
    assert distance(torch.cat([first, mixer(x[:, 2:], state=state)], 1), y) < 1e-12


@pytest.mark.parametrize(
    ("ratio", "wanted"), [*((r, "a number above 0") for r in (0.0, -1.0, math.inf)), (math.nan, "a number, but came as nan")]
)
def test_a_ratio_that_is_none_is_refused(ratio, wanted):
    with pytest.raises(ValueError, match=f"ratio must be {wanted}"):
        create("cross_cosformer", dim=32, ratio=ratio)
