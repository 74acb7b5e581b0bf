"""BaseConv against its equation, token by token in float64, with weights under the authors' names."""

import torch

from linattn.mixers import create
from tests.oracles.compare import distance


def test_token_by_token():
    mixer, x = create("base_conv", dim=32).double(), torch.randn(2, 20, 32, dtype=torch.float64)
    u, gate = (x @ mixer.in_proj.weight.T + mixer.in_proj.bias).split(64, -1)
    outputs = []
    for t in range(20):
        taps = [u[:, t - j] * mixer.conv.weight[:, 0, 2 - j] for j in range(3) if t >= j]
        outputs.append(torch.nn.functional.silu(sum(taps)) * gate[:, t])
    wanted = torch.stack(outputs, 1) @ mixer.o_proj.weight.T + mixer.o_proj.bias
    assert distance(mixer(x), wanted) < 1e-12


def test_weights_of_the_authors():
    """Shapes of BaseConv(d_model=32, expand_proj=4) in HazyResearch/based: in_proj, conv1.conv and out_proj."""
    theirs = {"in_proj.weight": (128, 32), "in_proj.bias": (128,), "conv1.conv.weight": (64, 1, 3)}
    theirs |= {"out_proj.weight": (32, 64), "out_proj.bias": (32,)}
    names = {"conv1.conv": "conv", "out_proj": "o_proj"}
    ours = {names.get(n.rpartition(".")[0], n.rpartition(".")[0]) + "." + n.rpartition(".")[2]: s for n, s in theirs.items()}
    assert {name: tuple(t.shape) for name, t in create("base_conv", dim=32).state_dict().items()} == ours


def test_it_trains():
    torch.manual_seed(0)
    mixer, x = create("base_conv", dim=32), torch.randn(4, 30, 32)
    optimizer, losses = torch.optim.Adam(mixer.parameters(), lr=1e-2), []
    for _ in range(30):
        loss = (mixer(x) - x.roll(1, 1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
