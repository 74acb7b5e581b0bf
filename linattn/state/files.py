"""Atomic file replacement, and errors for damaged files."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def writable(path: str | os.PathLike[str]) -> Path:
    """Check as far as possible, before the content is computed, that ``path`` can be written.

    Raises:
        OSError: if its folder is missing or not writable, and if it is a folder itself, a device or a pipe, which would
            be replaced by a file (``/dev/stdout`` too).
    """
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(f"{path} cannot be written: it is a folder, not a file")
    if path.exists() and not path.is_file():
        raise OSError(f"{path} cannot be written: it is a device or a pipe, not a file")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path} cannot be written: {path.parent} does not exist")
    if not os.access(path.parent, os.W_OK):
        raise PermissionError(f"{path} cannot be written: no permission to write in the folder {path.parent}")
    return path


def read_json(path: Path) -> dict[str, Any]:
    """Read the JSON object in ``path``.

    Raises:
        OSError: if it can't be read.
        ValueError: if it holds anything else, or is cut off.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged, truncated or not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object, but holds a {type(content).__name__}")
    return content


@contextmanager
def content_of(path: Path) -> Iterator[None]:
    """Raise ValueError naming ``path`` if the block finds its content incomplete or of other types."""
    try:
        yield
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        told = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"{path} is damaged, or was written by another version of linattn: {told}") from error


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a new name beside ``path`` to write to; on exit, sync that file and rename it to ``path``.

    A reader of ``path`` finds the old file or the new one, never a part, also after a crash. If
    the block raises, ``path`` is unchanged and nothing is left behind.
    """
    path = writable(path)
    aside = path.with_name(f".{path.name}.{secrets.token_hex(6)}.part")
    try:
        yield aside
        sync(aside)
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)
    sync(path.parent)


def sync(path: Path) -> None:
    """Sync ``path``, a file or a folder, to the disk."""
    if os.name == "nt" and path.is_dir():  # Windows has no folder handles, and orders renames itself
        return
    handle = os.open(path, os.O_RDONLY if os.name != "nt" else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
