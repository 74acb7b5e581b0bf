"""Store of states by their tokens, so that a prefix is read once."""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from filelock import FileLock
from torch import nn

import linattn
from linattn.arguments import described, typed, whole
from linattn.state.identity import identity
from linattn.state.state import State

_NAME = re.compile(r"(\d+)-[0-9a-f]{64}\.safetensors")


class PrefixStore:
    """Store of prefix states in files ``LENGTH-HASH.safetensors``; the least recently used are removed first.

    The hash covers the tokens, the model (configuration, dtype, weights) and the version of this library, so that one folder can
    serve many models. Any number of processes may use it at once; one of them at a time reads or writes, under a lock.
    """

    @typed
    def __init__(self, folder: str | os.PathLike[str], *, max_bytes: int = 2**30) -> None:
        """Make ``folder`` if missing. Its files together have at most ``max_bytes``.

        Raises:
            ValueError: if ``max_bytes`` is not a positive integer.
            OSError: if ``folder`` is a file, or cannot be made.
        """
        whole("max_bytes", max_bytes, 1)
        self.folder, self.max_bytes = Path(folder), max_bytes
        if self.folder.is_file():
            raise NotADirectoryError(f"{folder} is a file, not a folder for states")
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = FileLock(self.folder / ".lock")

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        with self._lock:
            return sum(path.stat().st_size for path in self._files())

    def find(self, model: nn.Module, rows: Sequence[Sequence[int]]) -> tuple[int, State | None]:
        """Find the longest stored prefix for each of ``rows`` (lists of tokens); returns these states as one, row by row.

        Returns its number of tokens, equal for all rows, and the state on the model's device; (0, None) if there is none.
        """
        _check_rows("rows", rows)
        shortest = min(len(row) for row in rows)
        with self._lock:
            lengths = sorted({n for path in self._files() if 0 < (n := _length(path)) <= shortest})
            start = _start(model) if lengths else None
            keys = [_keys(start.copy(), row, lengths) for row in rows] if start else []
            for n in reversed(lengths):
                if all(self._path(n, key[n]).is_file() for key in keys):
                    states = [s for key in keys if (s := self._read(model, n, key[n])) is not None]
                    if len(states) == len(rows) and _alike(states):
                        return n, State.cat(states)
        return 0, None

    def put(self, model: nn.Module, tokens: Sequence[int], state: State) -> None:
        """Store ``state``, one row that has read ``tokens``. The least recently used states are removed if the store is full.

        A state larger than ``max_bytes`` is not stored.
        """
        _check_rows("tokens", [tokens])
        if not isinstance(state, State):
            raise TypeError(f"state must be a linattn.State, but came as {described(state)}")
        if state.rows != 1:
            raise ValueError(f"state must have one row, but came with {state.rows}")
        n = len(tokens)
        key = _keys(_start(model), tokens, [n])[n]
        with self._lock:
            for left in self.folder.glob(".*.part"):  # of a killed process, since the lock excludes other writers
                left.unlink()
            path = self._path(n, key)
            if state.nbytes <= self.max_bytes:
                if not path.is_file():
                    state.save(path, model=model, description={"key": key})
                _touch(path)
            self._shrink()  # also files of processes with a larger ``max_bytes``

    def _files(self) -> Iterator[Path]:
        return (path for path in self.folder.iterdir() if _NAME.fullmatch(path.name) and path.is_file() and not path.is_symlink())

    def _path(self, length: int, key: str) -> Path:
        return self.folder / f"{length}-{key}.safetensors"

    def _read(self, model: nn.Module, length: int, key: str) -> State | None:
        """Read a state; None if its file is damaged, which is then removed."""
        path = self._path(length, key)
        try:
            state = State.load(path, device=next(model.parameters()).device, description={"key": key})  # the key identifies the model too
        except ValueError:
            path.unlink()
            return None
        _touch(path)
        return state

    def _shrink(self) -> None:
        """Remove the least recently used states until ``max_bytes`` suffice."""
        files = sorted(((path, path.stat()) for path in self._files()), key=lambda one: one[1].st_mtime_ns)
        total = sum(stat.st_size for _, stat in files)
        for path, stat in files:
            if total <= self.max_bytes:
                return
            path.unlink()
            total -= stat.st_size


def _check_rows(name: str, rows: Sequence[Sequence[int]]) -> None:
    fits = isinstance(rows, (list, tuple)) and rows and all(isinstance(row, Sequence) and not isinstance(row, (str, bytes)) for row in rows)
    if not fits or not all(isinstance(token, int) and -(2**63) <= token < 2**63 for row in rows for token in row):
        raise ValueError(f"{name} must be tokens, integers in lists, but came as {described(rows)}")


def _start(model: nn.Module) -> hashlib._Hash:
    """Common part of all keys of ``model``."""
    return hashlib.sha256(json.dumps([linattn.__version__, torch.__version__, identity(model)], sort_keys=True).encode())


def _keys(whole: hashlib._Hash, tokens: Sequence[int], lengths: Sequence[int]) -> dict[int, str]:
    """Hash of the first n ``tokens`` added to ``whole``, for each n of the ascending ``lengths``."""
    content, done, keys = array("q", tokens), 0, {}
    for n in lengths:
        whole.update(content[done:n].tobytes())
        done, keys[n] = n, whole.hexdigest()
    return keys


def _alike(states: Sequence[State]) -> bool:
    """True if sizes are equal, except slots: layers that keep every token may have padding."""
    sizes = [[{name: t.shape for name, t in layer.items()} for layer in state.layers] for state in states]
    return all(size == sizes[0] for size in sizes)


def _length(path: Path) -> int:
    return int(path.name.split("-")[0])


def _touch(path: Path) -> None:
    now = time.time_ns()
    os.utime(path, ns=(now, now))
