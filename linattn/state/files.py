"""Files that are there whole or not at all."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def writable(path: str | os.PathLike[str]) -> Path:
    """``path``, where a file can be written as far as one can tell before there is anything to write.

    Raises:
        OSError: where its folder is not there or not to be written to, and where it is a folder itself.
    """
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(f"{path} cannot be written: it is a folder, and a file is wanted")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path} cannot be written: there is no folder {path.parent}")
    if not os.access(path.parent, os.W_OK):
        raise PermissionError(f"{path} cannot be written: no permission to write in the folder {path.parent}")
    return path


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Give a new name beside ``path`` to write to; on leaving, sync that file and rename it to ``path``.

    Whoever reads ``path`` meanwhile, and whoever comes after a crash, finds the old file or the new one, never a part. If
    the block raises, nothing stays behind and ``path`` is as it was.
    """
    path = writable(path)
    aside = path.with_name(f".{path.name}.{secrets.token_hex(6)}.part")
    try:
        yield aside
        _sync(aside)
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)
    if os.name != "nt":  # Windows has no handle of a folder, and its rename is already ordered
        _sync(path.parent)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY if os.name != "nt" else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
