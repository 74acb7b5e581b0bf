"""The folder of a report: whose it is, and how it is filled without ever showing half a file.

report.json is there from the first moment, first with ``complete: false``, and says that the folder is a comparison's. A
comparison replaces report.json, report.html and models/ of an earlier one and touches nothing else.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from linattn.state import empty, only_writer, read_json, replacing

SCHEMA = "linattn.compare"
VERSION = 1


class Folder:
    """The output folder of one comparison, or of what another ``schema`` names; refuses one that holds something else."""

    def __init__(self, path: Path, schema: str = SCHEMA) -> None:
        self.path, self.schema = path, schema
        self.json, self.html, self.models = path / "report.json", path / "report.html", path / "models"
        self._check()

    def _check(self) -> None:
        path = self.path
        if path.exists() and not path.is_dir():
            raise ValueError(f"--out must be a folder, but {path} is a file")
        if not empty(path) and self.load() is None:
            raise ValueError(f"--out {path} holds files that are no linattn report; name an empty or a new folder")
        if self.models.is_symlink():
            raise ValueError(f"{self.models} is a link; its target is not touched. Remove the link or name another --out")

    @contextmanager
    def held(self) -> Iterator[None]:
        """Let no other process write here meanwhile; raises ValueError where one does, or has left something else here by now."""
        with only_writer(self.path):
            self._check()
            yield

    def load(self) -> dict | None:
        """Read report.json; None if there is none, or one of another kind. Raises ValueError for a damaged one."""
        if not self.json.is_file():
            return None
        report = read_json(self.json)
        if report.get("schema") != self.schema:
            return None
        if report.get("version") != VERSION:
            raise ValueError(f"{self.json} is of version {report.get('version')}, and this linattn writes {VERSION}: name another folder")
        return report

    def begin(self, report: dict) -> None:
        """Clear an earlier report away and leave the mark of the new one."""
        self.path.mkdir(parents=True, exist_ok=True)
        self.save(report)
        self.html.unlink(missing_ok=True)
        shutil.rmtree(self.models, ignore_errors=True)
        self.models.mkdir()

    def save(self, report: dict) -> None:
        """Write report.json."""
        write_text(self.json, json.dumps(report, indent=1, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write ``path`` as UTF-8, whole or not at all; what UTF-8 can't say (half of a file's name) becomes "?".

    A device or a pipe, such as ``/dev/stdout``, is written to as it is: nothing can take its place.
    """
    if path.exists() and not (path.is_file() or path.is_dir()):
        path.write_text(text, encoding="utf-8", errors="replace", newline="\n")
        return
    with replacing(path) as aside:
        aside.write_text(text, encoding="utf-8", errors="replace", newline="\n")
