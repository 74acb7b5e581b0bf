"""Atomic creation of folders."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from linattn.state.files import sync


@contextmanager
def new_folder(path: Path, kept: Callable[[], bool] = lambda: False) -> Iterator[Path]:
    """Yield a new folder beside ``path`` to fill; on exit, sync its content and rename it to ``path``.

    An existing folder is replaced, unless ``kept``: another process may have created it first, and others may be reading it. If
    the block raises, the new folder is removed and ``path`` is unchanged.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name[:24]}.{secrets.token_hex(6)}.part")
    aside.mkdir()
    try:
        yield aside
        publish(aside, path, kept)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def publish(aside: Path, path: Path, kept: Callable[[], bool] = lambda: False) -> None:
    """Sync the folder ``aside`` with its files and rename it to ``path``; an existing one is removed, unless ``kept``."""
    for file in (*aside.iterdir(), aside):
        sync(file)
    try:
        aside.rename(path)  # fails if the folder exists and is not empty
    except OSError:
        if not path.exists():
            raise
        if kept():
            return
        shutil.rmtree(path)
        aside.rename(path)
    sync(path.parent)
