"""Tokens in memory-mapped shards with an index of documents, for data sets larger than memory.

A folder holds, for the splits train and validation:

* train-00000.bin: tokens, little-endian, of the smallest unsigned type that holds them
* train-00000.ends: the end of each document in its shard, int64
* index.json: number of tokens, documents and bytes of text and the SHA-256 of each shard
* tokenizer.json, unless tokens are bytes
"""

from __future__ import annotations

import bisect
import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from linattn.data.codec import ByteCodec, Codec, TokenizerCodec
from linattn.state import content_of, digest, read_json

INDEX, TOKENIZER, FORMAT = "index.json", "tokenizer.json", 1
SPLITS = ("train", "validation")


class Shards:
    """Tokens of one split as one sequence that can be sliced, with the places where its documents begin."""

    def __init__(self, tokens: Sequence[np.ndarray], ends: Sequence[np.ndarray]) -> None:
        """Concatenate shards: ``tokens`` [n] each, and ``ends`` [documents], the last of which is n."""
        self._tokens, self._ends = list(tokens), list(ends)
        self._first = [0, *accumulate(len(t) for t in tokens)]

    def __len__(self) -> int:
        return self._first[-1]

    def __getitem__(self, part: slice) -> np.ndarray:
        """Read the tokens from ``part.start`` to ``part.stop``, which may lie in several shards."""
        start, stop, _ = part.indices(len(self))
        pieces = []
        for i in range(self._shard(start), len(self._tokens)):
            if self._first[i] >= stop:
                break
            pieces.append(self._tokens[i][max(0, start - self._first[i]) : stop - self._first[i]])
        return np.concatenate(pieces) if pieces else np.zeros(0, np.uint8)

    def starts(self, start: int, stop: int) -> np.ndarray:
        """Offsets from ``start``, above 0, at which documents begin before ``stop``: [n] int64."""
        found = []
        for i in range(self._shard(start), len(self._tokens)):
            first, ends = self._first[i], self._ends[i]
            if first >= stop:
                break
            low, high = np.searchsorted(ends, [start - first, stop - first], side="right")
            found.append(np.asarray(ends[low:high]) + (first - start))
        joined = np.concatenate(found) if found else np.zeros(0, np.int64)
        return joined[joined < stop - start]

    def _shard(self, place: int) -> int:
        return max(0, bisect.bisect_right(self._first, place) - 1)


@dataclass(frozen=True)
class Prepared:
    """A folder of tokens, with the attributes of :class:`linattn.data.Corpus`; ``train`` and ``validation`` are :class:`Shards`.

    ``end`` is the text of the token that ends each document; None: documents have no end token.
    """

    train: Shards
    validation: Shards
    vocab_size: int
    sha256: str
    validation_bytes: int
    codec: Codec
    end: str | None = None

    def bits_per_byte(self, loss: float) -> float:
        """Convert a mean validation loss in nats per token."""
        return loss / np.log(2.0).item() * len(self.validation) / self.validation_bytes


def prepared(folder: str | os.PathLike[str]) -> Prepared:
    """Map a ``folder`` written by :func:`linattn.data.prepare`. File sizes are checked, contents by :func:`check` only.

    Raises:
        OSError: if it is missing.
        ValueError: if it is damaged.
    """
    folder = Path(folder)
    if not (folder / INDEX).is_file():
        raise FileNotFoundError(f"{folder} has no {INDEX}: linattn data prepare did not write it")
    index = read_json(folder / INDEX)
    with content_of(folder / INDEX):
        if index["format"] != FORMAT or index.pop("sha256") != (sha256 := digest_of(index)):
            raise ValueError("its SHA-256 differs from the recorded one")
        dtype = np.dtype(index["dtype"]).newbyteorder("<")
        splits = {split: _split(folder, index["splits"][split], dtype) for split in SPLITS}
        codec = ByteCodec() if index["tokens"] == "bytes" else TokenizerCodec(folder / TOKENIZER)
        text = sum(shard["bytes"] for shard in index["splits"]["validation"])
        about = {"vocab_size": index["vocab_size"], "sha256": sha256, "validation_bytes": text, "end": index.get("end")}
        return Prepared(splits["train"], splits["validation"], codec=codec, **about)


def check(folder: str | os.PathLike[str]) -> int:
    """Compare every file of ``folder`` with its SHA-256 and return the number of tokens.

    Raises:
        OSError, ValueError: as :func:`prepared`, and for the first file whose content has changed.
    """
    data, folder = prepared(folder), Path(folder)
    index = read_json(folder / INDEX)
    shards = [shard for split in SPLITS for shard in index["splits"][split]]
    for name, wanted in [pair for shard in shards for pair in shard["sha256"].items()] + list(index["tokenizer_sha256"].items()):
        if digest(folder / name) != wanted:
            raise ValueError(f"{folder / name} is damaged: its SHA-256 is not the one in {INDEX}")
    return len(data.train) + len(data.validation)


def digest_of(index: dict[str, Any]) -> str:
    """SHA-256 of an index without its own."""
    return hashlib.sha256(json.dumps(index, sort_keys=True).encode()).hexdigest()


def _split(folder: Path, shards: list[dict[str, Any]], dtype: np.dtype) -> Shards:
    tokens = [_map(folder, f"{shard['name']}.bin", dtype, shard["tokens"]) for shard in shards]
    return Shards(tokens, [_map(folder, f"{shard['name']}.ends", np.dtype("<i8"), shard["documents"]) for shard in shards])


def _map(folder: Path, name: str, dtype: np.dtype, count: int) -> np.ndarray:
    if Path(name).name != name:
        raise ValueError(f"{name!r} is not the name of a file in the folder")
    if not (folder / name).is_file() or (size := (folder / name).stat().st_size) != count * dtype.itemsize:
        raise ValueError(f"{name} is missing or not {count * dtype.itemsize:,} bytes" if count else f"{name} has {size} bytes")
    return np.memmap(folder / name, dtype=dtype, mode="r") if count else np.zeros(0, dtype)
