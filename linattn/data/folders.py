"""Folders that are there whole or not at all."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Give a new folder beside ``path`` to fill; on leaving, sync what is in it and rename it to ``path``.

    A folder that stood there is replaced. If the block raises, nothing stays behind and ``path`` is as it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name[:24]}.{secrets.token_hex(6)}.part")
    aside.mkdir()
    try:
        yield aside
        publish(aside, path)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def publish(aside: Path, path: Path) -> None:
    """Sync the folder ``aside`` with the files in it, then give it the name ``path``; what had that name goes."""
    for file in (*aside.iterdir(), aside):
        sync(file)
    if path.exists():
        shutil.rmtree(path)
    aside.rename(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Wait until ``path``, a file or a folder, is on the disk."""
    if os.name == "nt" and path.is_dir():  # Windows has no handle of a folder, and its renames are already ordered
        return
    handle = os.open(path, os.O_RDONLY if os.name != "nt" else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
