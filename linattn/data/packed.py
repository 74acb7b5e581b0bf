"""Packed tokens as a map-style dataset in which the sample i is a pure function of (seed, i)."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from linattn.arguments import described, whole

_MASK = (1 << 64) - 1


class PackedTokens(Dataset):
    """Windows of ``context`` tokens in an order that needs no memory.

    Sample i belongs to pass i // windows over the text. Each pass begins at another offset below ``context`` and reads the
    windows from there in another order. Going on at step n is therefore arithmetic, whatever n is.
    """

    def __init__(self, tokens: np.ndarray, context: int, *, seed: int = 0, samples: int) -> None:
        """
        Args:
            tokens: one-dimensional array of ids, a memory map for instance.
            context: tokens of one sample.
            seed: seed of the order.
            samples: the length of the dataset; more than the text has windows means more than one pass.
        """
        if not isinstance(tokens, np.ndarray) or tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise TypeError(f"tokens must be a one-dimensional array of integers, but came as {described(tokens)}")
        for name, value, least in (("context", context, 1), ("seed", seed, 0), ("samples", samples, 0)):
            whole(name, value, least)
        if len(tokens) < context:
            raise ValueError(f"the text has {len(tokens)} tokens, fewer than the context of {context}")
        self.tokens, self.context, self.seed, self.samples = tokens, context, seed, samples
        self.windows = max(1, (len(tokens) - context + 1) // context)  # after the largest offset

    def __len__(self) -> int:
        return self.samples

    def place(self, i: int) -> int:
        """Offset of sample ``i`` in the text."""
        epoch, rank = divmod(i, self.windows)
        key = _mix(_mix(self.seed) ^ epoch)
        offset = _mix(key ^ 1) % min(self.context, len(self.tokens) - self.windows * self.context + 1)
        return offset + self.context * permuted(rank, self.windows, key)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        """``input_ids`` and ``labels`` [context], int64, one tensor: models shift labels themselves."""
        start = self.place(i)
        ids = torch.from_numpy(self.tokens[start : start + self.context].astype(np.int64))
        return {"input_ids": ids, "labels": ids}


class Windows(Dataset):
    """Evenly spaced ``count`` windows of ``context`` tokens of the text, on which losses are measured."""

    def __init__(self, tokens: np.ndarray, context: int, count: int) -> None:
        if len(tokens) < context:
            raise ValueError(f"the validation part of the text has {len(tokens)} tokens, fewer than the context of {context}")
        self.tokens, self.context = tokens, context
        self.count = min(count, len(tokens) // context)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        """``input_ids`` and ``labels`` [context], int64."""
        start = i * (len(self.tokens) - self.context) // max(self.count - 1, 1)
        ids = torch.from_numpy(self.tokens[start : start + self.context].astype(np.int64))
        return {"input_ids": ids, "labels": ids}


def permuted(i: int, n: int, key: int) -> int:
    """Image of ``i`` under the permutation of range(n) that ``key`` selects.

    Four rounds of a Feistel network over the next even number of bits; images outside range(n) are sent through again.
    """
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    low = (1 << half) - 1
    while True:
        left, right = i >> half, i & low
        for turn in range(4):
            left, right = right, left ^ (_mix(key ^ (turn << 32) ^ right) & low)
        i = left << half | right
        if i < n:
            return i


def _mix(x: int) -> int:
    """SplitMix64's output function: 64 bits in, 64 well-mixed bits out."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ x >> 27) * 0x94D049BB133111EB) & _MASK
    return x ^ x >> 31
