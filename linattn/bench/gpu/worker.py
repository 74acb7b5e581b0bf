"""Worker process for each library, which isolates crashes, hangs and imports.

Processes are forked from a server that has imported torch and never used a GPU, so that a new one starts quickly and is
as independent as one started separately.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, Self

CONTEXT: Any = multiprocessing.get_context("forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn")
CONTEXT.set_forkserver_preload(["torch", "linattn.bench.gpu.measure"])


class Failure(Exception):
    """Failed call. ``kind``: "refuses" (with a message of the library), "fails", "out of memory", "timed out", "crashed"."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Worker:
    """Runner of functions in another process, one at a time; a new process is started after a failure that may have damaged it."""

    def __init__(self, folders: Sequence[str] = (), environment: dict[str, str] | None = None) -> None:
        self.folders, self.environment = list(folders), environment or {}
        self.process: Any = None
        self.connection: Connection | None = None

    def call(self, function: Callable, *arguments: Any, timeout: float) -> Any:
        """Run ``function(*arguments)``; returns its result or a :class:`Failure`."""
        if self.connection is None:
            self._start()
        assert self.connection is not None
        try:
            self.connection.send((function, arguments))
            if not self.connection.poll(timeout):
                self.close()
                raise Failure("timed out", f"no result after {timeout:.0f} s")
            kind, value, healthy = self.connection.recv()
        except (EOFError, OSError):
            self.process.join(10)
            code = self.process.exitcode
            self.close()
            raise Failure("crashed", f"the process ended with exit code {code}") from None
        if not healthy:
            self.close()
        if kind is not None:
            raise Failure(kind, value)
        return value

    def _start(self) -> None:
        self.connection, theirs = CONTEXT.Pipe()
        self.process = CONTEXT.Process(target=_serve, args=(theirs, self.folders, self.environment), daemon=True)
        self.process.start()
        theirs.close()

    def close(self) -> None:
        """End the process, if there is one."""
        if self.connection is not None:
            self.connection.close()
            self.process.kill()
            self.process.join()
        self.connection = self.process = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _serve(connection: Connection, folders: list[str], environment: dict[str, str]) -> None:
    os.environ.update(environment)
    sys.path[:0] = folders
    while True:
        try:
            function, arguments = connection.recv()
        except EOFError:
            return
        connection.send(_run(function, arguments))


def _run(function: Callable, arguments: tuple) -> tuple[str | None, Any, bool]:
    """Run in the child: kind of failure or None, the result or the message, and whether this process can be used again."""
    import torch

    try:
        return None, function(*arguments), True
    except Exception as error:  # any exception of another library is its case's result
        refused = isinstance(error, (RuntimeError, ValueError, AssertionError))
        kind = "out of memory" if isinstance(error, torch.OutOfMemoryError) else "refuses" if refused else "fails"
        message = f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
    try:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
    except RuntimeError:  # after a failed kernel this process can no longer use the device
        return "crashed", message, False
    return kind, message, True
