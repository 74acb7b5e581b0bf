"""Lock of a folder for a single writing process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LOCK, HOLDER = ".lock", ".lock.pid"  # the system's lock, and its holder: Windows lets no other process read a locked file


def empty(folder: Path) -> bool:
    """True if ``folder`` is missing or holds nothing but the files of a lock."""
    return not folder.exists() or all(path.name in (LOCK, HOLDER) for path in folder.iterdir())


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Hold the only writer's lock on ``folder``, which is made if missing; the lock ends with the process in any case.

    Raises:
        ValueError: at once, if another process (or another thread, or this one) holds the lock.
        OSError: if the folder can't be made or written to.
    """
    from filelock import FileLock, Timeout

    folder.mkdir(parents=True, exist_ok=True)
    lock, holder = FileLock(folder / LOCK), folder / HOLDER
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise ValueError(f"another process{_holder(holder)} is writing to {folder}: wait until it ends, or choose another folder") from None
    try:
        holder.write_text(f"{os.getpid()}\n", encoding="utf-8")
        yield
    finally:
        holder.unlink(missing_ok=True)
        lock.release()


def _holder(holder: Path) -> str:
    """Holder named in ``holder``; empty if it can't be read, since the lock alone decides."""
    try:
        return f" (pid {int(holder.read_text(encoding='utf-8'))})"
    except (OSError, ValueError):
        return ""
