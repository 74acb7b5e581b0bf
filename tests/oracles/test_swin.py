"""Swin against transformers' layers with the same weights, and, where windows are not full, token by token."""

import pytest
import torch
from torch import nn

from linattn.mixers import create
from linattn.mixers.memory.swin import PatchMerging
from linattn.models import ImageConfig, ImageModel
from tests.oracles.compare import assert_graded, distance
from tests.oracles.images import shaken

pytest.importorskip("transformers")


def both(grid, shifted):
    """Our layer, and theirs with the same weights and without its feed-forward."""
    from transformers import SwinConfig
    from transformers.models.swin.modeling_swin import SwinLayer

    config = SwinConfig(window_size=3, attention_probs_dropout_prob=0.0, hidden_dropout_prob=0.0)
    config._attn_implementation = "sdpa"  # the other one computes its softmax in float32
    theirs = shaken(SwinLayer(config, 32, grid, 4, shift_size=1 if shifted else 0))
    with torch.no_grad():
        theirs.mlp.fc2.weight.zero_(), theirs.mlp.fc2.bias.zero_()
    ours = create("swin", dim=32, window=3, shifted=shifted).double()
    ours.relative_position_bias_table = theirs.attention.relative_position_bias.relative_position_bias_table
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        setattr(ours, name, getattr(theirs.attention, name))
    return (lambda x: x + ours(theirs.layernorm_before(x), *grid)), theirs


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("grid", [(6, 9), (3, 6), (3, 3)])
def test_transformers(shifted, grid):
    """Nothing is shifted where a side is one window."""
    ours, theirs = both(grid, shifted)
    x = torch.randn(2, grid[0] * grid[1], 32, dtype=torch.float64)
    weights = [*theirs.attention.parameters(), *theirs.layernorm_before.parameters()]
    assert_graded(ours, lambda x: theirs(x, grid)[0], x, weights, 1e-10)


def test_theirs_sees_what_fills_windows_up():
    """On a grid of 4 x 6 the first window is full and agrees; the last is not full and differs."""
    ours, theirs = both((4, 6), False)
    x = torch.randn(1, 24, 32, dtype=torch.float64)
    got, wanted = ours(x), theirs(x, (4, 6))[0]
    assert distance(got[:, :18], wanted[:, :18]) < 1e-12 and distance(got[:, 18:], wanted[:, 18:]) > 1e-3


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("grid", [(1, 1), (4, 5), (7, 3), (7, 8)])
def test_token_by_token(shifted, grid):
    """Section 3.2: a token's window follows from its position, independent of the windows' layout."""
    ours = shaken(create("swin", dim=8, heads=2, window=3, shifted=shifted))
    shift = 1 if shifted and min(grid) > 3 else 0
    places = [(i, j) for i in range(grid[0]) for j in range(grid[1])]
    window = [((i - shift) // 3, (j - shift) // 3) for i, j in places]

    def loop(x):
        q, k, v = (p(x).unflatten(-1, (2, 4)) for p in (ours.q_proj, ours.k_proj, ours.v_proj))
        out = []
        for t, (i, j) in enumerate(places):
            seen = [s for s in range(len(places)) if window[s] == window[t]]
            away = [5 * (i - places[s][0] + 2) + j - places[s][1] + 2 for s in seen]
            scores = torch.einsum("bhk,bshk->bsh", q[:, t], k[:, seen]) / 2 + ours.relative_position_bias_table[away]
            out.append(torch.einsum("bsh,bshv->bhv", scores.softmax(1), v[:, seen]))
        return ours.o_proj(torch.stack(out, 1).flatten(-2))

    x = torch.randn(2, len(places), 8, dtype=torch.float64)
    assert_graded(lambda x: ours(x, *grid), loop, x, list(ours.parameters()))


@pytest.mark.parametrize("grid", [(4, 6), (5, 3)])
def test_merging(grid):
    from transformers.models.swin.modeling_swin import SwinPatchMerging

    theirs, ours = shaken(SwinPatchMerging(8)), PatchMerging(8).double()
    ours.norm, ours.reduction = theirs.norm, theirs.reduction
    x = torch.randn(2, grid[0] * grid[1], 8, dtype=torch.float64)
    assert_graded(lambda x: ours(x, *grid), lambda x: theirs(x, grid), x, list(theirs.parameters()))


def test_a_stack_shifts_every_other_layer():
    model = ImageModel(ImageConfig(image_size=(8, 8), patch_size=1, dim=32, layers=4, mixer="swin"))
    found = [layer.mixer.shifted for layer in model.layers]
    assert found == [False, True, False, True]
    assert isinstance(model.layers[0].mixer.q_proj, nn.Linear)


def test_refusals():
    with pytest.raises(ValueError, match="window must be at least 1, but came as 0"):
        create("swin", dim=32, window=0)
