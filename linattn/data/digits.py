"""Handwritten digits, 1,797 images of 8 x 8 pixels, from scikit-learn."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from importlib import import_module

import numpy as np
import torch
from torch import Tensor

from linattn.data.packed import permuted

CLASSES, SIZE = 10, 8
_TEST = 5  # every fifth image, in a shuffled order, is for the test


@dataclass(frozen=True)
class Digits:
    """Images [N, 1, 8, 8] float32 from -1 (paper) to 1 (ink) and their digits [N] int64, for training and for the test."""

    train: Tensor
    train_labels: Tensor
    test: Tensor
    test_labels: Tensor
    sha256: str  # of the pixels and labels


@cache
def digits() -> Digits:
    """Load the digits in a fixed split: 1,437 for training and 360 for the test (UCI's optical recognition of digits).

    Raises:
        ModuleNotFoundError: if scikit-learn, which contains them, is not installed.
    """
    found = import_module("sklearn.datasets").load_digits()
    pixels, labels = found.images.astype(np.uint8), found.target.astype(np.uint8)
    count = len(pixels)
    order = torch.tensor([permuted(i, count, key=0) for i in range(count)])
    images = torch.from_numpy(pixels).float()[order, None] / 8 - 1
    shown = torch.from_numpy(labels).long()[order]
    asked = torch.arange(count) % _TEST == 0
    sha256 = hashlib.sha256(pixels.tobytes() + labels.tobytes()).hexdigest()
    return Digits(images[~asked], shown[~asked], images[asked], shown[asked], sha256)


def shifted(images: Tensor, most: int, generator: torch.Generator) -> Tensor:
    """Shift each of ``images`` [B, 1, height, width] by up to ``most`` pixels along both sides, filled with paper."""
    height, width = images.shape[2:]
    padded = torch.nn.functional.pad(images, (most,) * 4, value=-1.0)
    down, right = torch.randint(0, 2 * most + 1, (2, len(images), 1), generator=generator)
    rows, columns = down + torch.arange(height), right + torch.arange(width)  # [B, height], [B, width]
    return padded[torch.arange(len(images))[:, None, None], 0, rows[:, :, None], columns[:, None]][:, None]
