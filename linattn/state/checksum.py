"""SHA-256 checksums in safetensors files, by which a flipped bit is detected.

The checksum is in the file's metadata and covers every byte of the file but its own digits. A file without one, of other
programs or earlier versions, is not checked.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from linattn.state.files import replacing

KEY, PREFIX = "checksum", "sha256:"
BLANK = PREFIX + 64 * "0"  # placeholder of the digest
_LONGEST = 100_000_000  # limit of a header's bytes, as in safetensors
_PIECE = 1 << 20


def save_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file with a checksum, atomically.

    Raises:
        OSError: where it cannot be written.
    """
    with replacing(path) as aside:
        write_tensors(aside, tensors, metadata, path)


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str], name: Path | None = None) -> None:
    """Write the file without a rename, for a new folder that is synced as a whole; errors call the file ``name``."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(dict(tensors), path, metadata={**metadata, KEY: BLANK})
        _fill_in(path)
    except (SafetensorError, OSError) as error:
        raise OSError(f"{name or path} could not be written: {error}") from None


def _fill_in(path: Path) -> None:
    """Put the checksum in place of :data:`BLANK` and sort the metadata, whose order safetensors varies."""
    with path.open("r+b") as file:
        size = _header_size(file.read(8), path)
        content = json.loads(file.read(size))
        content["__metadata__"] = dict(sorted(content["__metadata__"].items()))
        header = json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode().ljust(size)
        if len(header) != size:
            raise OSError("its header cannot be put in order")
        file.seek(8)
        file.write(header)
        file.flush()
        file.seek(8 + header.index(BLANK.encode()))
        file.write((PREFIX + digest(path, BLANK)).encode())


def damage(path: Path, metadata: Mapping[str, str] | None) -> str | None:
    """Damage to the bytes of the safetensors file ``path`` with this ``metadata``, worded to follow its name; None if there is none."""
    # Either the key or the prefix: one flipped bit can make only one of them unreadable, so it cannot hide that there is a checksum.
    found = [value for key, value in (metadata or {}).items() if key == KEY or value.startswith(PREFIX)]
    if found and found[0] != PREFIX + digest(path, found[0]):
        return "is damaged: its SHA-256 differs from the one recorded in it"
    return None


def digest(path: Path, blanked: str | None = None) -> str:
    """SHA-256 of a file in hexadecimal digits; in its header ``blanked`` counts as :data:`BLANK`."""
    total = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        if blanked is not None:
            size = file.read(8)
            total.update(size)
            total.update(file.read(_header_size(size, path)).replace(blanked.encode(), BLANK.encode(), 1))
        while piece := file.read(_PIECE):
            total.update(piece)
    return total.hexdigest()


def digest_of_text(text: str) -> str:
    """SHA-256 of ``text`` in hexadecimal digits."""
    return hashlib.sha256(text.encode()).hexdigest()


def _header_size(size: bytes, path: Path) -> int:
    """Bytes of the header behind the first eight, which hold its size."""
    count = int.from_bytes(size, "little")
    if len(size) < 8 or count > min(_LONGEST, os.path.getsize(path)):
        raise ValueError(f"{path} is truncated or not a safetensors file")
    return count
