"""State files named by requests, to continue from or to write when a sequence ends. Nothing here imports vLLM.

The environment variable ``LINATTN_STATES`` names the folder; without it requests that name a file are refused. A name is letters, digits,
``-`` and ``_``: no path leads out of the folder, and links in it are not followed. The process with the model writes the model's identity
into the folder (``.model.json``), so that the processes that receive requests can refuse a file before a request is queued.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from linattn.arguments import described
from linattn.state import State, read_json, replacing
from linattn.state.identity import identity
from linattn.vllm.layout import Layout

VARIABLE = "LINATTN_STATES"
LOAD, SAVE = "linattn_state", "linattn_save"  # keys of a request's vllm_xargs
PROCESSOR = "linattn.vllm.requests:StateFiles"
_MODEL, _NAME = ".model.json", re.compile(r"[A-Za-z0-9_-]{1,128}")
_LOG = logging.getLogger("vllm.linattn")


def folder() -> Path | None:
    """Resolved folder of the state files; None if there is none.

    Raises:
        ValueError: if the variable names no folder.
    """
    if not (given := os.environ.get(VARIABLE)):
        return None
    if not Path(given).is_dir():
        raise ValueError(f"{VARIABLE} must name a folder, but came as {given!r}")
    return Path(given).resolve()


def path_of(name: object) -> Path:
    """Path of the file with the name ``name`` in requests.

    Raises:
        ValueError: for an invalid name or a link, or if there is no folder.
    """
    here = folder()
    if here is None:
        raise ValueError(f"this server keeps no state files: {VARIABLE} names no folder")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(f"a state's name must be 1 to 128 letters, digits, - and _, but came as {described(name)}: {str(name)[:64]!r}")
    path = here / f"{name}.safetensors"
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise ValueError(f"the state {name!r} is not a regular file, so it is not read")
    return path


def begin(model: nn.Module) -> None:
    """Record in the folder that its states belong to ``model``, a :class:`linattn.hf.LinattnForCausalLM`."""
    here = folder()
    if here is not None:
        for left in here.glob(".*.pending"):  # of a server that was killed
            left.unlink(missing_ok=True)
        with replacing(here / _MODEL) as aside:
            aside.write_text(json.dumps(identity(model)), encoding="utf-8")


def model_identity() -> dict[str, Any]:
    """Read the identity of the served model, written by :func:`begin`."""
    here = folder()
    assert here is not None, "path_of comes first"
    return read_json(here / _MODEL)


def read(name: object) -> State:
    """Read the state of one row from the file ``name``.

    Raises:
        ValueError: for an invalid name, and for a file that is missing, damaged or of another model.
    """
    path = path_of(name)
    if not path.exists():
        raise ValueError(f"there is no state {name!r}")
    try:
        state = State.load(path, model=model_identity())
    except (ValueError, OSError) as error:
        raise ValueError(f"the state {name!r} cannot be continued: {str(error).replace(str(path), path.name)}") from None
    if state.rows != 1:
        raise ValueError(f"the state {name!r} must hold one sequence, but holds {state.rows}")
    return state


def check(extra: Mapping[str, Any] | None, samples: int = 1) -> None:
    """Check the state files requested in ``extra`` before the request is queued, and mark the file that it will write.

    Raises:
        ValueError: for an unknown key, an invalid name, a file that is missing or does not fit, and several ``samples`` of one file.
    """
    extra = extra or {}
    if unknown := sorted(key for key in extra if key.startswith("linattn_") and key not in (LOAD, SAVE)):
        raise ValueError(f"vllm_xargs: there is no {unknown[0]!r}; there are {LOAD} and {SAVE}")
    if LOAD in extra and not _pending(path_of(extra[LOAD])).exists():
        read(extra[LOAD])
    if SAVE in extra:
        path = path_of(extra[SAVE])
        if samples != 1:
            raise ValueError(f"{SAVE} names one file, but the request asks for {samples} samples")
        _pending(path).touch()


def _pending(path: Path) -> Path:
    """Path of the mark that exists while a request that writes ``path`` runs."""
    return path.with_name(f".{path.stem}.pending")


@dataclass
class Wanted:
    """Files of one sequence: its initial state, the name of the file to write, and the layers of the state so far."""

    state: State | None = None
    save: str | None = None
    failed: bool = False
    kept: dict[int, dict[str, Tensor]] = field(default_factory=dict)

    @classmethod
    def of(cls, extra: Mapping[str, Any]) -> Wanted:
        """Read the files requested in ``extra``, which was checked before; a file removed since is logged and marked as failed."""
        wanted = cls(save=extra.get(SAVE))
        try:
            wanted.state = read(extra[LOAD]) if LOAD in extra else None
        except ValueError as error:
            _LOG.error("a request ends at once: %s", error)
            wanted.failed, wanted.save = True, None
        return wanted

    def end(self) -> None:
        """Write the state if requested; an error is logged, because the response has begun."""
        if self.save is None:
            return
        try:
            path = path_of(self.save)
            if self.kept:
                State([self.kept[layer] for layer in sorted(self.kept)]).save(path, model=model_identity())
            _pending(path).unlink(missing_ok=True)
        except (ValueError, OSError) as error:
            _LOG.error("the state %r could not be written: %s", self.save, error)


class Rows:
    """Requested files of the sequences of a step, by row."""

    def __init__(self) -> None:
        self._rows: dict[int, Wanted] = {}

    @property
    def failed(self) -> list[int]:
        """Rows whose state could not be read, and which have to end."""
        return [row for row, wanted in self._rows.items() if wanted.failed]

    def add(self, row: int, extra: Mapping[str, Any] | None) -> None:
        """Add a sequence with the requested files ``extra`` in ``row``; an earlier one there has ended."""
        self.remove(row)
        if extra and (LOAD in extra or SAVE in extra):
            self._rows[row] = Wanted.of(extra)

    def remove(self, row: int) -> None:
        """Remove the sequence in ``row``, and write its state if requested."""
        if (wanted := self._rows.pop(row, None)) is not None:
            wanted.end()

    def move(self, source: int, target: int, *, swap: bool) -> None:
        """Move the sequence from row ``source`` to ``target``, or exchange the two with ``swap``."""
        moved, other = self._rows.pop(source, None), self._rows.pop(target, None)
        if moved is not None:
            self._rows[target] = moved
        if swap and other is not None:
            self._rows[source] = other

    def given(self, layer: int) -> dict[int, dict[str, Tensor]]:
        """Initial states of ``layer`` by row."""
        return {row: wanted.state.layers[layer] for row, wanted in self._rows.items() if wanted.state is not None}

    def keep(self, layer: int, layout: Layout, pages: Tensor, index: Tensor) -> None:
        """Copy the states of ``layer`` that will be written from the pages ``index`` of a step's rows."""
        for row, wanted in self._rows.items():
            if wanted.save is not None and row < len(index):
                wanted.kept[layer] = layout.read(pages, index[row : row + 1])


ROWS = Rows()  # rows of the process with the model, updated by requests.StateFiles
