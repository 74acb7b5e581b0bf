"""Metadata and tensors of one GGUF file. Every length is checked against the size of the file before it is used.

The header is parsed here, because the reader of the ``gguf`` package takes seconds for a tokenizer's lists and trusts their lengths;
the formats of quantised tensors are that package's.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from linattn.extras import missing

SUFFIX = ".gguf"
TYPES = {0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 8: "Q8_0", 30: "BF16"}  # ggml's codes of the supported tensor types
_PLAIN = {"F32": np.float32, "F16": np.float16, "BF16": np.int16}
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}  # GGUF's codes of value types
_STRING, _ARRAY = 8, 9
_VERSIONS = (2, 3)
_MOST_DIMENSIONS = 4  # ggml's limit


@dataclass(frozen=True)
class Stored:
    """Place of one tensor: its type, its shape with the rows first, and where its bytes are."""

    kind: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


class GGUFFile:
    """``metadata`` by key and ``tensors`` by name; :meth:`tensor` reads one.

    Raises:
        OSError: if there is no such file.
        ImportError: if the ``gguf`` package is not installed.
        ValueError: for a file that is damaged, truncated, of another format or version, or has tensors of another type.
    """

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise FileNotFoundError(f"{path} {'is not a file' if path.exists() else 'does not exist'}")
        self.path, self._gguf = path, gguf_package()
        self._bytes = np.memmap(path, mode="r") if path.stat().st_size else np.zeros(0, np.uint8)
        try:
            cursor = _Cursor(self._bytes)
            tensors, values = _head(cursor)
            self.metadata = dict(cursor.pair() for _ in range(values))
            self.tensors = self._stored(cursor, tensors)
        except (ValueError, KeyError, OverflowError) as error:  # UnicodeDecodeError is a ValueError
            raise ValueError(f"{path} is damaged, truncated or not a GGUF file that linattn reads: {error}") from None

    def tensor(self, name: str) -> Tensor:
        """Read a tensor: F16 and BF16 unchanged, every other as float32."""
        stored = self.tensors[name]
        data = self._bytes[stored.start : stored.start + stored.nbytes]
        if stored.kind in _PLAIN:
            plain = torch.from_numpy(np.array(data).view(_PLAIN[stored.kind]))
            return (plain.view(torch.bfloat16) if stored.kind == "BF16" else plain).reshape(stored.shape)
        kind = self._gguf.GGMLQuantizationType[stored.kind]
        rows = data.reshape(math.prod(stored.shape[:-1]), -1)
        with np.errstate(all="ignore"):  # a file may hold infinite scales
            return torch.from_numpy(self._gguf.quants.dequantize(rows, kind)).reshape(stored.shape)

    def floats(self) -> int:
        """Number of bytes of all tensors in memory."""
        return sum(math.prod(t.shape) * (2 if t.kind in ("F16", "BF16") else 4) for t in self.tensors.values())

    def _stored(self, cursor: _Cursor, count: int) -> dict[str, Stored]:
        """Read the places of the tensors; their data starts after the header, aligned."""
        entries = [
            (
                cursor.string(),
                [cursor.scalar("Q") for _ in range(cursor.count(_MOST_DIMENSIONS, "I"))],
                cursor.scalar("I"),
                cursor.scalar("Q"),
            )
            for _ in range(count)
        ]
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise ValueError(f"general.alignment must be a power of two, but is {alignment!r}")
        base = -(-cursor.at // alignment) * alignment
        found: dict[str, Stored] = {}
        for name, sizes, kind, offset in entries:
            if name in found:
                raise ValueError(f"there are two tensors {name!r}")
            found[name] = self._placed(name, tuple(reversed(sizes)), kind, base + offset)
        return found

    def _placed(self, name: str, shape: tuple[int, ...], kind: int, start: int) -> Stored:
        """Check that a tensor lies within the file."""
        known = {t.value: t.name for t in self._gguf.GGMLQuantizationType}
        if kind not in TYPES:
            raise ValueError(f"{name} is stored as {known.get(kind, kind)}; only {', '.join(TYPES.values())} are read")
        block, size = self._gguf.GGML_QUANT_SIZES[kind]
        if not shape or 0 in shape or shape[-1] % block:
            raise ValueError(f"{name} has rows of {shape[-1] if shape else 0}, but {TYPES[kind]} has blocks of {block}")
        nbytes = math.prod(shape) // block * size
        if start + nbytes > len(self._bytes):
            raise ValueError(f"{name} ends at byte {start + nbytes:,}, but the file has {len(self._bytes):,}")
        return Stored(TYPES[kind], shape, start, nbytes)


class _Cursor:
    """Cursor in the header, from which values are read in turn."""

    def __init__(self, data: np.ndarray) -> None:
        self._data, self.at = data, 0

    def take(self, nbytes: int) -> bytes:
        """Read the next bytes."""
        if nbytes > len(self._data) - self.at:
            raise ValueError(f"{nbytes:,} bytes are wanted from byte {self.at:,} on, but the file has {len(self._data):,}")
        self.at += nbytes
        return self._data[self.at - nbytes : self.at].tobytes()

    def scalar(self, code: str) -> Any:
        """Read one number by its code in ``struct``."""
        return struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}")))[0]

    def count(self, most: int, code: str = "Q") -> int:
        """Read a count of at most ``most``."""
        if (n := self.scalar(code)) > most:
            raise ValueError(f"byte {self.at:,} has a count of {n:,}, but at most {most:,} are possible")
        return n

    def string(self) -> str:
        """Read a length and a text of that length."""
        return self.take(self.scalar("Q")).decode()

    def pair(self) -> tuple[str, Any]:
        """Read a key and its value."""
        return self.string(), self.value(self.scalar("I"))

    def value(self, kind: int) -> Any:
        """Read a value of GGUF's type ``kind``; lists of numbers come as lists."""
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            inner = self.scalar("I")
            n = self.count(len(self._data) - self.at)  # an entry has at least one byte
            if inner in _SCALARS:
                code = _SCALARS[inner]
                return list(struct.unpack(f"<{n}{code}", self.take(n * struct.calcsize(f"<{code}"))))
            if inner == _STRING:
                return [self.string() for _ in range(n)]
        if kind not in _SCALARS:
            raise ValueError(f"byte {self.at:,} has a value of type {inner if kind == _ARRAY else kind}, which is not supported")
        return self.scalar(_SCALARS[kind])


def _head(cursor: _Cursor) -> tuple[int, int]:
    """Read the start of a file: the numbers of its tensors and of its metadata."""
    if (magic := cursor.take(4)) != b"GGUF":
        raise ValueError(f"it begins with {magic!r}, not with b'GGUF'")
    if (version := cursor.scalar("I")) not in _VERSIONS:
        raise ValueError(f"its version is {version}, but {' and '.join(map(str, _VERSIONS))} are read")
    return cursor.scalar("Q"), cursor.scalar("Q")


def gguf_package() -> Any:
    """Import the ``gguf`` package."""
    try:
        import gguf
    except ImportError as error:
        raise ModuleNotFoundError(f"{missing('gguf', 'a GGUF file')} ({error})", name="gguf") from None
    return gguf
