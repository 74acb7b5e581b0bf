"""SLAB against the paper's equations token by token, and against figures of the authors' code; its norm, and its folding."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from linattn.mixers import create
from linattn.mixers.vision.prepbn import PRepBN, folded
from tests.oracles.compare import distance
from tests.oracles.images import assert_figures, assert_loop, convolved, shaken, tokens

# Of the authors' code with its float32 block in float64.
VALUES = [1.37732676738, 1.24912928219, -3.34507037513, -1.07072973189, -0.0939615637488, 6.46009359611, -1.14005085509, -2.14026378507]
GRADIENTS = [55.4696031033, 82.5739713126, -133.592006417, -24.3106227657, 94.737209188, -29.4217204089, -120.015393513, 129.827879448]


def loop(mixer, x, height, width):
    """Equation 9 of arXiv 2405.11582, and the constants of the authors' code."""
    rows = []
    for image in x:
        q, k, v = mixer.qkv(image).chunk(3, -1)
        q, k = F.relu(q), F.relu(k + mixer.positional_encoding[0])
        heads = []
        for h in range(mixer.heads):
            mine = slice(h * v.shape[1] // mixer.heads, (h + 1) * v.shape[1] // mixer.heads)
            local = convolved(v[:, mine].view(height, width, -1), mixer.dwc.weight, mixer.dwc.bias).flatten(0, 1)
            out = []
            for t in range(len(image)):
                weights = [q[t, mine] @ k[i, mine] for i in range(len(image))]
                out.append(sum(w * v[i, mine] for i, w in enumerate(weights)) / (sum(weights) + 1e-6) + local[t])
            heads.append(torch.stack(out))
        rows.append(mixer.proj(torch.cat(heads, -1)))
    return torch.stack(rows)


def test_the_equations_token_by_token():
    mixer = shaken(create("slab", dim=16, heads=2, grid=(3, 4)))
    x = torch.randn(2, 12, 16, dtype=torch.float64, requires_grad=True)
    assert_loop(mixer, x, (3, 4), loop(mixer, x, 3, 4))


def test_figures_of_the_authors_code():
    assert_figures(create("slab", dim=16, heads=2, grid=(5, 5)), tokens(5, 5, 16), 5, VALUES, GRADIENTS)


def trained(dim: int, steps: int = 5, calls: int = 8, **options) -> PRepBN:
    """A norm after ``calls`` batches, with weights away from zero and one."""
    norm = PRepBN(dim, steps=steps, **options)
    with torch.no_grad():
        for p in norm.parameters():
            p.add_(0.3 * torch.randn_like(p))
    for _ in range(calls):
        norm(3 * torch.randn(4, 10, dim) + 2)
    return norm


def test_the_schedule():
    """Equation 4 with torch's own norms: λ is 1 in the warm-up and in the first step after it, 0 after ``steps`` more."""
    norm, x = trained(8, steps=4, calls=0, warmup=2), torch.randn(3, 10, 8)
    for share in (1, 1, 1, 0.75, 0.5, 0.25, 0, 0):
        layer = F.layer_norm(x, (8,), norm.norm1.weight, norm.norm1.bias)
        bn = norm.norm2.bn
        batch = F.batch_norm(x.flatten(0, 1), None, None, bn.weight, bn.bias, training=True).view(x.shape)
        torch.testing.assert_close(norm(x), share * layer + (1 - share) * (batch + norm.norm2.alpha * x))


def test_out_of_training_it_is_the_batch_norm_alone():
    norm, x = trained(8, steps=1000).eval(), torch.randn(3, 10, 8)
    bn = norm.norm2.bn
    batch = F.batch_norm(x.flatten(0, 1), bn.running_mean, bn.running_var, bn.weight, bn.bias).view(x.shape)
    torch.testing.assert_close(norm(x), batch + norm.norm2.alpha * x)
    torch.testing.assert_close(bn.running_mean, torch.full((8,), 2.0), atol=1.5, rtol=0)  # they were gathered from the first step on


@pytest.mark.parametrize("bias", [True, False])
def test_the_fold(bias):
    norm, linear, x = trained(32).eval(), nn.Linear(32, 48, bias=bias), 3 * torch.randn(4, 20, 32) + 2
    one = folded(norm, linear)
    assert distance(one(x), linear(norm(x))) < 1e-5 and type(one) is nn.Linear
    assert distance(folded(norm.double(), linear.double())(x.double()), linear(norm(x.double()))) < 1e-12


def test_names_of_the_authors_code():
    assert sorted(PRepBN(4).state_dict()) == sorted(
        ["warm", "iter", "total_step", "norm1.weight", "norm1.bias", "norm2.alpha", "norm2.bn.weight", "norm2.bn.bias"]
        + ["norm2.bn.running_mean", "norm2.bn.running_var", "norm2.bn.num_batches_tracked"]
    )
