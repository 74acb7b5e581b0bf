"""GBST against charformer-pytorch with the same weights, and character by character.

Theirs gets a mask, since without one it pads sequences to a multiple of 12 with zeros that count in the means at the end and, if
calibrated, as characters. Its convolution is depthwise and anticausal; ours, over all channels and both directions, gets the product
of its two maps.
"""

import pytest
import torch
from torch import nn

from linattn.mixers import create
from tests.oracles import standins
from tests.oracles.compare import assert_graded, distance
from tests.oracles.images import shaken


class Given(nn.Module):
    """Replacement of their embedding that returns given vectors."""

    x: torch.Tensor

    def forward(self, ids):
        return self.x


def both(calibrated, downsample):
    module = standins.module("charformer-pytorch==0.0.4", "charformer_pytorch/charformer_pytorch.py")
    theirs = module.GBST(num_tokens=1, dim=16, max_block_size=4, downsample_factor=downsample, score_consensus_attn=calibrated).double()
    theirs.token_emb = Given()
    ours = create("charformer", dim=16, downsample=downsample, kernel_size=7, calibrated=calibrated).double()
    ours.score = theirs.score_fn[0]
    each, across = theirs.pos_conv[2].conv, theirs.pos_conv[2].proj_out
    with torch.no_grad():
        ours.score.weight.mul_(5)
        ours.conv.weight.zero_()
        ours.conv.weight[..., 3:] = across.weight * each.weight[:, 0]
        ours.conv.bias.copy_(across.weight[..., 0] @ each.bias + across.bias)
    return ours, theirs


@pytest.mark.parametrize("calibrated", [False, True])
@pytest.mark.parametrize(("length", "downsample"), [(1, 2), (12, 2), (13, 4), (23, 3)])
def test_wheel(calibrated, length, downsample):
    ours, theirs = both(calibrated, downsample)
    x, mask = torch.randn(2, length, 16, dtype=torch.float64), torch.ones(2, length, dtype=torch.bool)

    def tokenised(x):
        theirs.token_emb.x = x
        return theirs(torch.zeros(x.shape[:2], dtype=torch.int64), mask)[0]

    assert_graded(lambda x: ours(x)[0], tokenised, x, list(ours.score.parameters()))


def test_theirs_counts_its_padding():
    """Without a mask the last mean of 13 characters is of one character and a zero."""
    ours, theirs = both(False, 2)
    x = torch.randn(1, 13, 16, dtype=torch.float64)
    theirs.token_emb.x = x
    ids, mask = torch.zeros(1, 13, dtype=torch.int64), torch.ones(1, 13, dtype=torch.bool)
    plain, masked = theirs(ids)[0], theirs(ids, mask)[0]
    assert distance(plain[:, :6], masked[:, :6]) < 1e-12 and distance(plain[:, 6], masked[:, 6]) > 0.1
    assert distance(ours(x)[0], masked) < 1e-12


@pytest.mark.parametrize("calibrated", [False, True])
@pytest.mark.parametrize(("length", "kernel_size"), [(1, 3), (4, 0), (7, 3)])
def test_character_by_character(calibrated, length, kernel_size):
    """Section 2.1, with blocks of up to 3 characters and 2 to a token, gradients of all weights."""
    ours = shaken(create("charformer", dim=8, block=3, kernel_size=kernel_size, calibrated=calibrated))

    def loop(x):
        rows = []
        for row in x:
            if kernel_size:
                taps = range(-(kernel_size // 2), kernel_size // 2 + 1)
                row = torch.stack([
                    sum(ours.conv.weight[..., s - taps[0]] @ row[t + s] for s in taps if 0 <= t + s < length) + ours.conv.bias
                    for t in range(length)
                ])  # fmt: skip
            blocks = [[row[t // b * b : t // b * b + b].mean(0) for b in (1, 2, 3)] for t in range(length)]
            p = torch.stack([torch.cat([ours.score(block) for block in found]).softmax(0) for found in blocks])
            if calibrated:
                p = torch.stack([torch.stack([p[t] @ p[s] for s in range(length)]).softmax(0) @ p for t in range(length)])
            mixed = [sum(w * block for w, block in zip(p[t], blocks[t], strict=True)) for t in range(length)]
            rows.append(torch.stack([torch.stack(mixed[t : t + 2]).mean(0) for t in range(0, length, 2)]))
        return torch.stack(rows)

    x = torch.randn(2, length, 8, dtype=torch.float64)
    assert_graded(lambda x: ours(x)[0], loop, x, list(ours.parameters()))


def test_padding_where_it_is_calibrated():
    """Scores include only real characters."""
    ours = shaken(create("charformer", dim=8, calibrated=True))
    x = torch.randn(2, 9, 8, dtype=torch.float64)
    mask = torch.arange(9) < torch.tensor([[9], [5]])
    y, real = ours(x, mask)
    assert distance(y[1][real[1]], ours(x[1:, :5])[0][0]) < 1e-12


def test_refusals():
    with pytest.raises(ValueError, match="block must be at least 1, but came as 0"):
        create("charformer", dim=32, block=0)
    with pytest.raises(ValueError, match="kernel_size must be odd, or 0 for no convolution, but came as 2"):
        create("charformer", dim=32, kernel_size=2)
