"""Tokenisation of text, JSON lines and Parquet into memory-mapped shards."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np

from linattn.arguments import typed, whole
from linattn.data.codec import ByteCodec, Codec, TokenizerCodec
from linattn.data.documents import documents
from linattn.data.folders import new_folder
from linattn.data.packed import mix
from linattn.data.shards import FORMAT, INDEX, SPLITS, TOKENIZER, digest_of
from linattn.data.sources import files

BATCH = 1 << 22  # characters tokenised at a time, in parallel
SHARD_TOKENS = 1 << 28


@typed
def prepare(
    inputs: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    tokenizer: str | os.PathLike[str] | None = None,
    end: str | None = None,
    field: str = "text",
    validation: float = 0.01,
    shard_tokens: int = SHARD_TOKENS,
    progress: Callable[[int, int], None] = lambda documents, tokens: None,
) -> dict[str, int]:
    """Tokenise ``inputs`` into the folder ``out``, written atomically; memory does not grow with the text.

    Args:
        inputs: files or patterns: ``.jsonl`` and ``.parquet`` hold a document in each line or row, other files are text.
        out: a folder that does not exist or is empty; its layout is that of :mod:`linattn.data.shards`.
        tokenizer: a Hugging Face ``tokenizer.json``; None: one token per byte.
        end: text of the one token that ends each document; None: documents have no end token. Their borders are stored in either case.
        field: key or column of the text.
        validation: share of the documents to hold out, chosen by their number. If it selects none within the first
            4 MiB or so, this share of the end of that text is held out as a separate document.
        shard_tokens: least tokens of a shard, which ends with the document that reaches them.
        progress: called with the number of documents and of tokens so far.

    Returns:
        The number of documents and tokens: ``documents``, ``train``, ``validation``.

    Raises:
        OSError, ValueError: for inputs that cannot be read, an ``out`` that is not empty, or a split without documents.
    """
    folder, codec = Path(out), ByteCodec() if tokenizer is None else TokenizerCodec(tokenizer)
    whole("shard_tokens", shard_tokens, 1)
    if not 0 < validation < 1:
        raise ValueError(f"validation must be a share above 0 and below 1, but came as {validation!r}")
    if not folder.name:
        raise ValueError(f"out must be a folder with a name, but came as {str(out)!r}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} already exists: name another folder with --out")
    last = [] if end is None else codec.encode(end)
    if end is not None and len(last) != 1:
        raise ValueError(f"end must be one token, but {end!r} is {len(last)}")
    paths = files(list(inputs))
    with new_folder(folder) as aside:
        dtype = np.min_scalar_type(codec.vocab_size - 1).newbyteorder("<")
        writers = {split: _Writer(aside, split, dtype, shard_tokens) for split in SPLITS}
        count = 0
        for batch in _batches((text for path in paths for text in documents(path, field)), BATCH):
            held = [mix(count + i) < validation * 2**64 for i in range(len(batch))]
            if not count and not any(held):
                batch = _end_apart(batch, validation)
                held = [False] * (len(batch) - 1) + [True]
            for text, tokens, is_held in zip(batch, _encoded(codec, batch), held, strict=True):
                writers[SPLITS[is_held]].add([*tokens, *last], len(text.encode()))
            count += len(batch)
            progress(count, sum(writer.total for writer in writers.values()))
        index = {**_index(aside, codec, dtype, writers), "end": end}
        if lacking := [split for split in SPLITS if not writers[split].total]:
            raise ValueError(
                f"no text is left for {lacking[0]} (documents: {count:,}): give more text, or change validation = {validation}"
                if count
                else f"inputs hold no text: {', '.join(map(str, paths[:5]))}"
            )
        (aside / INDEX).write_text(json.dumps({**index, "sha256": digest_of(index)}, indent=1), encoding="utf-8")
    return {"documents": count, **{split: writer.total for split, writer in writers.items()}}


def _index(aside: Path, codec: Codec, dtype: np.dtype, writers: dict[str, _Writer]) -> dict[str, Any]:
    tokenizers: dict[str, str] = {}
    if isinstance(codec, TokenizerCodec):
        (aside / TOKENIZER).write_text(codec.content, encoding="utf-8")
        tokenizers[TOKENIZER] = hashlib.sha256(codec.content.encode()).hexdigest()
    return {
        "format": FORMAT,
        "dtype": np.dtype(dtype.type).name,
        "vocab_size": codec.vocab_size,
        "tokens": TOKENIZER if tokenizers else "bytes",
        "tokenizer_sha256": tokenizers,
        "splits": {split: writer.close() for split, writer in writers.items()},
    }


def _encoded(codec: Codec, texts: list[str]) -> list[list[int]]:
    return codec.encode_all(texts) if isinstance(codec, TokenizerCodec) else [codec.encode(text) for text in texts]


def _batches(texts: Iterable[str], size: int) -> Iterator[list[str]]:
    """Lists of ``texts`` of at least ``size`` characters each, without empty ones."""
    batch, letters = [], 0
    for text in filter(None, texts):
        batch.append(text)
        letters += len(text)
        if letters >= size:
            yield batch
            batch, letters = [], 0
    if batch:
        yield batch


def _end_apart(texts: list[str], share: float) -> list[str]:
    """``texts`` with the last ``share`` of their characters as a text of its own, unless the last text is shorter."""
    size = max(1, round(share * sum(map(len, texts))))
    return texts if size >= len(texts[-1]) else [*texts[:-1], texts[-1][:-size], texts[-1][-size:]]


@dataclass
class _Shard:
    """A shard that is being written, with the digests of its two files so far."""

    name: str
    file: IO[bytes]
    ends: list[int] = field(default_factory=list)
    bytes: int = 0
    sha256: Any = field(default_factory=hashlib.sha256)


class _Writer:
    """Writes documents of one split into shards of at least ``most`` tokens."""

    def __init__(self, folder: Path, split: str, dtype: np.dtype, most: int) -> None:
        self.folder, self.split, self.dtype, self.most = folder, split, dtype, most
        self.total = 0
        self._done: list[dict[str, Any]] = []
        self._open: _Shard | None = None

    def add(self, tokens: list[int], nbytes: int) -> None:
        """Append a document of ``nbytes`` bytes of text."""
        if self._open is None:
            name = f"{self.split}-{len(self._done):05}"
            self._open = _Shard(name, (self.folder / f"{name}.bin").open("wb"))
        shard, content = self._open, np.array(tokens, self.dtype).tobytes()
        shard.file.write(content)
        shard.sha256.update(content)
        shard.ends.append((shard.ends[-1] if shard.ends else 0) + len(tokens))
        shard.bytes += nbytes
        self.total += len(tokens)
        if shard.ends[-1] >= self.most:
            self._finish(shard)

    def close(self) -> list[dict[str, Any]]:
        """Finish the last shard and return all of them, as the index has them."""
        if self._open is not None:
            self._finish(self._open)
        return self._done

    def _finish(self, shard: _Shard) -> None:
        shard.file.close()
        ends = np.array(shard.ends, "<i8").tobytes()
        (self.folder / f"{shard.name}.ends").write_bytes(ends)
        digests = {f"{shard.name}.bin": shard.sha256.hexdigest(), f"{shard.name}.ends": hashlib.sha256(ends).hexdigest()}
        self._done.append(
            {"name": shard.name, "tokens": shard.ends[-1], "documents": len(shard.ends), "bytes": shard.bytes, "sha256": digests}
        )
        self._open = None
