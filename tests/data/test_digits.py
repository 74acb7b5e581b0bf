"""The digits: every image once, in a fixed split; shifts."""

import pytest
import torch

from linattn.data.digits import digits, shifted

SAMPLE = [8, 0, 6, 1, 2, 3, 3, 5, 5, 2, 9, 9]  # the first test digits: the split is fixed


def test_the_split():
    sklearn = pytest.importorskip("sklearn.datasets")
    data, found = digits(), sklearn.load_digits()
    assert data.train.shape == (1437, 1, 8, 8) and data.test.shape == (360, 1, 8, 8)
    ours = torch.cat([data.train, data.test]).flatten(1)
    ours = torch.cat([ours, torch.cat([data.train_labels, data.test_labels])[:, None]], 1)
    theirs = torch.cat([torch.from_numpy(found.data).float() / 8 - 1, torch.from_numpy(found.target)[:, None].float()], 1)
    assert torch.equal(torch.unique(ours, dim=0), torch.unique(theirs, dim=0)), "the same images with the same labels"
    assert data.train.aminmax() == (-1, 1) and len({*map(tuple, ours.tolist())}) == len({*map(tuple, theirs.tolist())})
    counts = torch.bincount(data.test_labels)
    assert counts.min() > 25 and counts.max() < 50, "every digit is asked"
    assert data.test_labels[:12].tolist() == SAMPLE and digits() is data


def test_shifts():
    image = torch.full((1, 1, 4, 5), -1.0)
    image[0, 0, 1, 2] = 1.0
    seen = shifted(image.expand(400, 1, 4, 5), 1, torch.Generator().manual_seed(0))
    assert seen.shape == (400, 1, 4, 5) and torch.equal(seen.sum((1, 2, 3)), image.sum().expand(400)), "nothing is lost, paper comes in"
    places = {tuple(place) for place in (seen[:, 0] == 1).nonzero()[:, 1:].tolist()}
    assert places == {(1 + i, 2 + j) for i in (-1, 0, 1) for j in (-1, 0, 1)}
    assert torch.equal(shifted(image, 0, torch.Generator()), image)
