"""Focused Linear Attention against the paper's equations token by token, and against figures of the authors' code."""

import pytest
import torch
import torch.nn.functional as F

from linattn.mixers import create
from linattn.mixers.vision.focused import focus
from tests.oracles.compare import distance
from tests.oracles.images import assert_figures, assert_loop, convolved, shaken, tokens

VALUES = [1.32904475628, 1.03419370784, -3.65749839459, -1.14741969114, 0.0691450484362, 6.63140371653, -1.08777850242, -2.277136147]
GRADIENTS = [61.8169868022, 93.1394960997, -127.803413424, -24.3324088197, 88.7885575615, -0.954189697045, -136.265799814, 136.11871282]


def loop(mixer, x, height, width):
    """Equations 5 to 8 of arXiv 2308.00442, and the constants of the authors' code."""
    rows = []
    for image in x:
        q, k, v = mixer.qkv(image).chunk(3, -1)
        k = k + mixer.positional_encoding[0]
        q, k = ((F.relu(t) + 1e-6) / F.softplus(mixer.scale[0]) for t in (q, k))
        q, k = (t.norm(dim=-1, keepdim=True) * t**3 / (t**3).norm(dim=-1, keepdim=True) for t in (q, k))
        heads = []
        for h in range(mixer.heads):
            mine = slice(h * v.shape[1] // mixer.heads, (h + 1) * v.shape[1] // mixer.heads)
            local = convolved(v[:, mine].view(height, width, -1), mixer.dwc.weight, mixer.dwc.bias).flatten(0, 1)
            out = []
            for t in range(len(image)):
                weights = [q[t, mine] @ k[i, mine] for i in range(len(image))]
                total = sum(w * v[i, mine] for i, w in enumerate(weights)) / len(image)
                out.append(total / (sum(weights) / len(image) + 1e-6) + local[t])
            heads.append(torch.stack(out))
        rows.append(mixer.proj(torch.cat(heads, -1)))
    return torch.stack(rows)


def test_the_equations_token_by_token():
    mixer = shaken(create("focused", dim=16, heads=2, grid=(3, 4)))
    x = torch.randn(2, 12, 16, dtype=torch.float64, requires_grad=True)
    assert_loop(mixer, x, (3, 4), loop(mixer, x, 3, 4))


def test_figures_of_the_authors_code():
    assert_figures(create("focused", dim=16, heads=2, grid=(5, 5)), tokens(5, 5, 16), 5, VALUES, GRADIENTS)


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_powers_never_leave_the_range_of_float32(size):
    x = torch.rand(5, 64) + 1e-3
    assert distance(focus(size * x, 8) / size, focus(x.double(), 8).float()) < 1e-5
    assert torch.allclose(focus(x, 8).norm(dim=-1), x.norm(dim=-1))  # proposition 1: the length stays
