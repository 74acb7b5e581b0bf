"""Folder of a report, whose files are written atomically.

report.json exists from the start, first with ``complete: false``, and identifies the folder as a comparison's. A comparison replaces
report.json, report.html and models/ of an earlier one and no other files.
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
    """Output folder of a comparison, or of another ``schema``; raises ValueError if it holds other files."""

    def __init__(self, path: Path, schema: str = SCHEMA) -> None:
        self.path, self.schema = path, schema
        self.json, self.html, self.models = path / "report.json", path / "report.html", path / "models"
        self._check()

    def _check(self) -> None:
        path = self.path
        if path.exists() and not path.is_dir():
            raise ValueError(f"--out must be a folder, but {path} is a file")
        if not empty(path) and self.load() is None:
            raise ValueError(f"--out {path} holds files that are not part of a linattn report; name an empty or a new folder")
        if self.models.is_symlink():
            raise ValueError(f"{self.models} is a link; its target is not touched. Remove the link or name another --out")

    @contextmanager
    def held(self) -> Iterator[None]:
        """Lock the folder; raises ValueError if another process is writing to it, or has written other files."""
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
        """Remove an earlier report and write the new one as incomplete."""
        self.path.mkdir(parents=True, exist_ok=True)
        self.save(report)
        self.html.unlink(missing_ok=True)
        shutil.rmtree(self.models, ignore_errors=True)
        self.models.mkdir()

    def save(self, report: dict) -> None:
        """Write report.json."""
        write_text(self.json, json.dumps(report, indent=1, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write ``path`` as UTF-8, atomically; characters that UTF-8 cannot encode (from invalid file names) become "?".

    A device or a pipe, such as ``/dev/stdout``, is written to directly, because it cannot be replaced.
    """
    if path.exists() and not (path.is_file() or path.is_dir()):
        path.write_text(text, encoding="utf-8", errors="replace", newline="\n")
        return
    with replacing(path) as aside:
        aside.write_text(text, encoding="utf-8", errors="replace", newline="\n")
