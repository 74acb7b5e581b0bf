"""Packed tokens as a map-style dataset whose sample i is a pure function of (seed, i)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from linattn.arguments import described, whole
from linattn.data.shards import Shards

_MASK = (1 << 64) - 1


class PackedTokens(Dataset):
    """Windows of ``context`` tokens in a random order that is computed, not stored.

    Sample i belongs to pass i // windows over the text. Each pass has its own offset below ``context`` and its own order of
    the windows. Resuming at step n therefore takes constant time.
    """

    def __init__(self, tokens: np.ndarray | Shards, context: int, *, seed: int = 0, samples: int, isolated: bool = True) -> None:
        """
        Args:
            tokens: one-dimensional array of ids, a memory map for instance, or shards of documents.
            context: tokens of one sample.
            seed: seed of the order.
            samples: length of the dataset; with more samples than windows the text is read more than once.
            isolated: shards also give the starts of documents, so that nothing crosses their borders.
        """
        if not isinstance(tokens, Shards) and (not isinstance(tokens, np.ndarray) or tokens.ndim != 1 or tokens.dtype.kind not in "iu"):
            raise TypeError(f"tokens must be a one-dimensional array of integers, but came as {described(tokens)}")
        for name, value, least in (("context", context, 1), ("seed", seed, 0), ("samples", samples, 0)):
            whole(name, value, least)
        if len(tokens) < context:
            raise ValueError(f"the text has {len(tokens)} tokens, fewer than the context of {context}")
        self.tokens, self.context, self.seed, self.samples, self.isolated = tokens, context, seed, samples, isolated
        self.windows = max(1, (len(tokens) - context + 1) // context)  # windows that fit after the largest offset

    def __len__(self) -> int:
        return self.samples

    def place(self, i: int) -> int:
        """Offset of sample ``i`` in the text."""
        epoch, rank = divmod(i, self.windows)
        key = mix(mix(self.seed) ^ epoch)
        offset = mix(key ^ 1) % min(self.context, len(self.tokens) - self.windows * self.context + 1)
        return offset + self.context * permuted(rank, self.windows, key)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        """``input_ids`` and ``labels`` [context], int64, one tensor, because models shift labels themselves. Shards: see :func:`sample`."""
        return sample(self.tokens, self.place(i), self.context, self.isolated)


class Windows(Dataset):
    """Evenly spaced ``count`` windows of ``context`` tokens of the text, on which losses are measured."""

    def __init__(self, tokens: np.ndarray | Shards, context: int, count: int, *, isolated: bool = True) -> None:
        if len(tokens) < context:
            raise ValueError(f"the validation part of the text has {len(tokens)} tokens, fewer than the context of {context}")
        self.tokens, self.context, self.isolated = tokens, context, isolated
        self.count = min(count, len(tokens) // context)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        """``input_ids`` and ``labels`` [context], int64. Shards: see :func:`sample`."""
        return sample(self.tokens, i * (len(self.tokens) - self.context) // max(self.count - 1, 1), self.context, self.isolated)


def sample(tokens: np.ndarray | Shards, start: int, context: int, isolated: bool = True) -> dict[str, Tensor]:
    """Read ``input_ids`` and ``labels`` [context], int64; for ``isolated`` shards also ``starts`` [n] of documents, where no label is."""
    ids = torch.from_numpy(tokens[start : start + context].astype(np.int64))
    if not isolated or not isinstance(tokens, Shards):
        return {"input_ids": ids, "labels": ids}
    starts = torch.from_numpy(tokens.starts(start, start + context))
    return {"input_ids": ids, "labels": ids.index_fill(0, starts, -100), "starts": starts}


def collate(samples: Sequence[dict[str, Tensor]], multiple: int = 1) -> dict[str, Tensor]:
    """Stack samples to [B, context]; those with ``starts`` become one row [1, B * context] with ``cu_seqlens`` [N + 1].

    Documents are then isolated, and the first token of each is not a label. N is rounded up to a ``multiple`` by empty sequences, so
    that a compiler sees few shapes.
    """
    batch = {name: torch.stack([one[name] for one in samples]) for name in ("input_ids", "labels")}
    if "starts" not in samples[0]:
        return batch
    rows, context = batch["input_ids"].shape
    begins = torch.cat([torch.cat([one["starts"].new_zeros(1), one["starts"]]) + row * context for row, one in enumerate(samples)])
    ends = begins.new_full((1 + -len(begins) % multiple,), rows * context)
    cu_seqlens = torch.cat([begins, ends])
    labels = batch["labels"].flatten().index_fill(0, begins, -100)
    return {"input_ids": batch["input_ids"].flatten()[None], "labels": labels[None], "cu_seqlens": cu_seqlens.to(torch.int32)}


def permuted(i: int, n: int, key: int) -> int:
    """Image of ``i`` under the pseudo-random permutation of range(n) selected by ``key``.

    Four rounds of a Feistel network over the next even number of bits; values outside range(n) are permuted again.
    """
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    low = (1 << half) - 1
    while True:
        left, right = i >> half, i & low
        for turn in range(4):
            left, right = right, left ^ (mix(key ^ (turn << 32) ^ right) & low)
        i = left << half | right
        if i < n:
            return i


def mix(x: int) -> int:
    """SplitMix64's output function: a bijective hash of 64 bits."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ x >> 27) * 0x94D049BB133111EB) & _MASK
    return x ^ x >> 31
