"""Text as two memory-mapped files of tokens, for training and for validation."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from linattn.arguments import typed
from linattn.data import sources
from linattn.data.codec import ByteCodec, Codec, TokenizerCodec
from linattn.data.folders import new_folder

FORMAT = 1
STRETCH, PART = 1 << 16, 20  # every 20th stretch of at most 64 KiB is for validation
AT_ONCE = 256  # stretches that are encoded in parallel
SPLITS = ("train", "validation")


@dataclass(frozen=True)
class Corpus:
    """Training and validation tokens, and the hash of their text.

    Args:
        train, validation: one-dimensional memory maps of token ids.
        vocab_size: number of different tokens.
        sha256: hash of the text, file by file, and of the tokenizer.
        validation_bytes: length of the validation text in UTF-8, so that losses can be given in bits per byte.
        codec: encodes and decodes text.
    """

    train: np.ndarray
    validation: np.ndarray
    vocab_size: int
    sha256: str
    validation_bytes: int
    codec: Codec

    def encode(self, text: str) -> list[int]:
        return self.codec.encode(text)

    def decode(self, tokens: Sequence[int]) -> str:
        return self.codec.decode(tokens)

    def bits_per_byte(self, loss: float) -> float:
        """Convert a mean validation loss in nats per token."""
        return loss / np.log(2.0).item() * len(self.validation) / self.validation_bytes


@typed
def corpus(paths: Sequence[str | os.PathLike[str]] | None = None, tokenizer: str | os.PathLike[str] | None = None) -> Corpus:
    """Read, split and tokenize a text; the same text and tokenizer are packed once and then mapped from the cache folder.

    Args:
        paths: UTF-8 files, or patterns such as ``"texts/*.txt"``, concatenated in this order. None or empty: the source of Python's
            standard library, tests left out (it differs between Python versions, so compare ``sha256``).
        tokenizer: a Hugging Face ``tokenizer.json``; None: one token per byte.

    The cache is ``$XDG_CACHE_HOME/linattn`` (``~/.cache/linattn``).

    Raises:
        OSError, ValueError: for a file that is missing, a folder, empty or not UTF-8, named in one line.
    """
    codec = ByteCodec() if tokenizer is None else TokenizerCodec(tokenizer)
    texts = [sources.read(path) for path in sources.files(paths)] if paths else sources.standard_library()
    digest = _digest(texts, codec)
    folder = cache_folder() / "corpora" / digest
    packed = _open(folder)
    if packed is None:
        _pack(folder, b"\n".join(texts), codec)
        packed = _open(folder)
        if packed is None:
            raise OSError(f"the tokens written to {folder} cannot be read back")
    return Corpus(**packed, vocab_size=codec.vocab_size, sha256=digest, codec=codec)


def cache_folder() -> Path:
    """Cache folder of linattn, whose files can be made again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "linattn"


def _digest(texts: list[bytes], codec: Codec) -> str:
    digest = hashlib.sha256(f"linattn corpus {FORMAT}\n".encode())
    extra = [codec.content.encode()] if isinstance(codec, TokenizerCodec) else []
    for text in texts + extra:
        digest.update(f"{len(text)}\n".encode() + text)
    return digest.hexdigest()


def _stretches(text: bytes) -> Iterator[tuple[str, bytes]]:
    """Cut ``text`` between characters; each stretch with the name of its split."""
    size, start, i = min(STRETCH, -(-len(text) // PART)), 0, 0
    while start < len(text):
        stop = min(start + size, len(text))
        while stop < len(text) and text[stop] & 0xC0 == 0x80:  # inside a character
            stop += 1
        yield SPLITS[i % PART == PART - 1], text[start:stop]
        start, i = stop, i + 1


def _pack(folder: Path, text: bytes, codec: Codec) -> None:
    try:
        with new_folder(folder, kept=lambda: _open(folder) is not None) as aside:
            about = _write_splits(aside, text, codec)
            (aside / "corpus.json").write_text(json.dumps(about))
    except OSError as error:
        if _open(folder) is not None:  # another process was first
            return
        raise OSError(f"the tokens cannot be kept in {folder.parent}: {error}; set XDG_CACHE_HOME to a folder with free space") from error


def _write_splits(aside: Path, text: bytes, codec: Codec) -> dict:
    dtype = np.min_scalar_type(codec.vocab_size - 1)
    counts, sizes = dict.fromkeys(SPLITS, 0), dict.fromkeys(SPLITS, 0)
    with (aside / "train.bin").open("wb") as train, (aside / "validation.bin").open("wb") as validation:
        files = {"train": train, "validation": validation}
        stretches = list(_stretches(text))
        for start in range(0, len(stretches), AT_ONCE):
            some = stretches[start : start + AT_ONCE]
            for (split, stretch), tokens in zip(some, _encoded([stretch for _, stretch in some], codec, dtype), strict=True):
                files[split].write(tokens)
                counts[split] += len(tokens) // dtype.itemsize
                sizes[split] += len(stretch)
    return {"format": FORMAT, "dtype": dtype.name, "tokens": counts, "bytes": sizes}


def _encoded(stretches: list[bytes], codec: Codec, dtype: np.dtype) -> list[bytes]:
    """Tokens of each stretch; a tokenizer encodes them in parallel."""
    if not isinstance(codec, TokenizerCodec):
        return stretches
    return [np.array(tokens, dtype=dtype).tobytes() for tokens in codec.encode_all([stretch.decode() for stretch in stretches])]


def _open(folder: Path) -> dict | None:
    """Open the splits in ``folder``; None if they are missing or damaged."""
    try:
        about = json.loads((folder / "corpus.json").read_text())
        dtype = np.dtype(about["dtype"])
        maps = {split: _map(folder / f"{split}.bin", dtype, about["tokens"][split]) for split in SPLITS}
        return {**maps, "validation_bytes": about["bytes"]["validation"]}
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _map(path: Path, dtype: np.dtype, tokens: int) -> np.ndarray:
    if path.stat().st_size != tokens * dtype.itemsize:
        raise ValueError(f"{path} is damaged")
    return np.memmap(path, dtype=dtype, mode="r") if tokens else np.zeros(0, dtype)
