"""A folder that one process at a time writes to."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LOCK, HOLDER = ".lock", ".lock.pid"  # the system's lock, and who has it: Windows lets nobody else read a locked file


def empty(folder: Path) -> bool:
    """Whether ``folder`` is not there or holds nothing but what a lock leaves."""
    return not folder.exists() or all(path.name in (LOCK, HOLDER) for path in folder.iterdir())


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Be the only process that writes to ``folder``, which is made if it is not there; the lock ends with the process, however that ends.

    Raises:
        ValueError: at once, where another process (or another thread, or this one) is its writer.
        OSError: where the folder can't be made or written to.
    """
    from filelock import FileLock, Timeout

    folder.mkdir(parents=True, exist_ok=True)
    lock, holder = FileLock(folder / LOCK), folder / HOLDER
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise ValueError(
            f"another process{_told(holder)} is writing to {folder}: wait until it has ended, or name another folder"
        ) from None
    try:
        holder.write_text(f"{os.getpid()}\n", encoding="utf-8")
        yield
    finally:
        holder.unlink(missing_ok=True)
        lock.release()


def _told(holder: Path) -> str:
    """Whom ``holder`` names; nothing where it can't be read, since the lock alone decides."""
    try:
        return f" (pid {int(holder.read_text(encoding='utf-8'))})"
    except (OSError, ValueError):
        return ""
