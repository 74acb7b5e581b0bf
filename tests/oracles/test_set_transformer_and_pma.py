"""Set Transformer against figures of the authors' modules.py in float64, and against the equations element by element."""

import pytest
import torch
import torch.nn.functional as F

from linattn.mixers import create
from tests.oracles.compare import assert_graded, distance
from tests.oracles.images import shaken, tokens, waved

# Every fiftieth number of what ISAB, SAB without norms and PMA of the authors' code give for waved weights, and of the gradients of Σ y³.
FIGURES = {
    "isab": (
        [-0.390473948097, 0.273547273449, -0.400063356535, 0.282473353268, -1.03091440919, -0.0383899728242, 0.0938866376119,
         -0.269704185841],
        [-0.0125329730621, 0.00772782248878, 0.00291833137106, -0.000253909963339, 0.00943742140002, 0.000483197192898, -0.00374000616961,
         -0.100702726144],
    ),
    "sab": (
        [-2.3630808411, -1.65513170125, -1.62079923283, -2.08093528915, -2.60994991531, -1.68964575871, -0.874863172982, -1.14334964802],
        [67.5609347502, 11.9815957242, -45.2935670577, 9.91684973125, 63.007021787, -101.188484627, 22.0097469826, 52.3487580348],
    ),
    "pma": (
        [-0.439694767575, 0.30449369272],
        [-0.0127893756344, 0.0118530897704, -0.01079037124, 0.0195923830083, -0.00910218365634, -0.000560893954975, 0.00172414726876,
         0.0108521243942],
    ),
}  # fmt: skip
KINDS = {
    "isab": ("set_transformer", {"inducing": 5}),
    "sab": ("set_transformer", {"inducing": None, "norm": False}),
    "pma": ("pma", {"seeds": 3}),
}


def made(kind):
    name, options = KINDS[kind]
    mixer = create(name, dim=16, heads=2, **options)
    return mixer, (lambda x: mixer(x)[0]) if kind == "pma" else mixer


@pytest.mark.parametrize("kind", KINDS)
def test_figures_of_the_authors_code(kind):
    mixer, call = made(kind)
    waved(mixer)
    x = tokens(3, 4, 16).requires_grad_()
    y = call(x)
    (gradient,) = torch.autograd.grad(y.pow(3).sum(), x)
    for got, wanted in zip((y, gradient), FIGURES[kind], strict=True):
        assert distance(got.flatten()[::50], torch.tensor(wanted, dtype=torch.float64)) < 1e-9


def mab(block, x, y, norm):
    """Section 3.1 for sets x and y [n, D]: each element of x attends to each of y, head by head."""
    heads, rows = block.heads, []
    for element in x:
        q = block.fc_q(element)
        parts = []
        for h, part in enumerate(q.chunk(heads)):
            keys, values = ([f(other).chunk(heads)[h] for other in y] for f in (block.fc_k, block.fc_v))
            weights = torch.stack([part @ k / len(q) ** 0.5 for k in keys]).softmax(0)
            parts.append(part + sum(w * v for w, v in zip(weights, values, strict=True)))
        h = torch.cat(parts)
        h = F.layer_norm(h, h.shape, block.ln0.weight, block.ln0.bias) if norm else h
        h = h + F.relu(block.fc_o(h))
        rows.append(F.layer_norm(h, h.shape, block.ln1.weight, block.ln1.bias) if norm else h)
    return torch.stack(rows)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [1, 6])
def test_element_by_element(kind, length):
    mixer, call = made(kind)
    shaken(mixer)

    def loop(x):
        if kind == "isab":
            return torch.stack([mab(mixer.mab1, row, mab(mixer.mab0, mixer.I[0], row, True), True) for row in x])
        return torch.stack([mab(mixer.mab, row if kind == "sab" else mixer.S[0], row, kind == "pma") for row in x])

    assert_graded(call, loop, torch.randn(2, length, 16, dtype=torch.float64), list(mixer.parameters()), 1e-11)


def test_inducing_points_are_a_bottleneck():
    """With one inducing point the attention output is the same for all elements."""
    mixer = shaken(create("set_transformer", dim=16, heads=1, inducing=1, norm=False))
    with torch.no_grad():
        mixer.mab1.fc_o.weight.zero_(), mixer.mab1.fc_o.bias.zero_()
    x = torch.randn(1, 7, 16, dtype=torch.float64)
    added = mixer(x) - mixer.mab1.fc_q(x)
    assert distance(added, added[:, :1].expand_as(added)) < 1e-12


def test_refusals():
    with pytest.raises(ValueError, match="inducing must be at least 1, but came as 0"):
        create("set_transformer", dim=32, inducing=0)
    with pytest.raises(ValueError, match="seeds must be at least 1, but came as 0"):
        create("pma", dim=32, seeds=0)
    with pytest.raises(ValueError, match="dim must be a positive multiple of its heads"):
        create("set_transformer", dim=32, heads=5)
