"""Agent Attention against the paper's equations token by token, and against figures of the authors' code."""

import pytest
import torch
import torch.nn.functional as F

from linattn.mixers import create
from tests.oracles.compare import distance
from tests.oracles.images import assert_figures, assert_loop, convolved, shaken, tokens

VALUES = [-0.144475151723, 2.09609423635, -2.23386533442, 1.82248137287, -0.0770383728133, 1.94915787876, -2.06040461858, 1.85255877483]
GRADIENTS = [-1.08054250056, -3.90915831597, 1.219056939, 3.12308872679, -2.23150853717, -2.81184518803, 1.26923851571, 1.42701713802]


def loop(mixer, x, height, width):
    """Section 4.2 of arXiv 2312.08874 for 4 agents and an even grid: each agent is the mean query of a quarter of the image."""
    dim, size = x.shape[-1], x.shape[-1] // mixer.heads
    an, na = (F.interpolate(t, (height, width), mode="bilinear") for t in (mixer.an_bias, mixer.na_bias))
    rows = []
    for image in x:
        q, k, v = mixer.qkv(image).chunk(3, -1)
        quarters = q.view(2, height // 2, 2, width // 2, dim)
        local = convolved(v.view(height, width, dim), mixer.dwc.weight, mixer.dwc.bias).flatten(0, 1)
        heads = []
        for h in range(mixer.heads):
            mine = slice(h * size, (h + 1) * size)
            asked, answers = [], []
            for a in range(4):
                agent = quarters[a // 2, :, a % 2, :, mine].mean((0, 1))
                places = [(i // width, i % width) for i in range(len(image))]
                gather = [an[h, a, i, j] + mixer.ah_bias[0, h, a, i, 0] + mixer.aw_bias[0, h, a, 0, j] for i, j in places]
                spread = [na[h, a, i, j] + mixer.ha_bias[0, h, i, 0, a] + mixer.wa_bias[0, h, 0, j, a] for i, j in places]
                answers.append((k[:, mine] @ agent * size**-0.5 + torch.stack(gather)).softmax(0) @ v[:, mine])
                asked.append(q[:, mine] @ agent * size**-0.5 + torch.stack(spread))
            heads.append(torch.stack(asked, -1).softmax(-1) @ torch.stack(answers))
        rows.append(mixer.proj(torch.cat(heads, -1) + local))
    return torch.stack(rows)


def test_the_equations_token_by_token():
    mixer = shaken(create("agent", dim=16, heads=2, agents=4, grid=(4, 6)))
    x = torch.randn(2, 24, 16, dtype=torch.float64, requires_grad=True)
    assert_loop(mixer, x, (4, 6), loop(mixer, x, 4, 6))


def test_figures_of_the_authors_code():
    assert_figures(create("agent", dim=16, heads=2, agents=9, grid=(5, 5)), tokens(5, 5, 16), 5, VALUES, GRADIENTS)


def test_rows_sum_to_one_and_their_rank_is_that_of_the_agents():
    mixer = shaken(create("agent", dim=32, heads=1, agents=4))
    with torch.no_grad():
        mixer.dwc.weight.zero_(), mixer.dwc.bias.zero_(), mixer.proj.bias.zero_(), mixer.proj.weight.copy_(torch.eye(32))
        x = torch.randn(1, 25, 32, dtype=torch.float64)
        y = mixer(x, 5, 5)
        values = mixer.qkv(x).chunk(3, -1)[2]
        assert torch.linalg.matrix_rank(y[0]) <= 4 < torch.linalg.matrix_rank(values[0])
        mixer.qkv.weight[64:].zero_(), mixer.qkv.bias[64:].fill_(1.0)
        assert distance(mixer(x, 5, 5), torch.ones_like(x)) < 1e-12


def test_agents_must_be_a_square():
    with pytest.raises(ValueError, match="agents must be the square of a number of at least 1, but came as 8"):
        create("agent", dim=32, agents=8)
