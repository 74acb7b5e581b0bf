"""Record of one card's figures, in one JSON file to which several runs add."""

from __future__ import annotations

import json
import sys
import time
from datetime import UTC, datetime
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

import torch

from linattn.bench.files import command
from linattn.state import read_json

SCHEMA = "linattn.bench.gpu"
EVERY = 3.0  # seconds between writes, at most lost when a run is killed


class Record:
    """Rows by key: a new figure replaces the old one of the same key, the others stay. A context manager that writes at exit."""

    def __init__(self, path: Path | None, key: tuple[str, ...], about: dict[str, Any]) -> None:
        self.path, self.key, self.written = path, key, 0.0
        self.body: dict[str, Any] = {"schema": SCHEMA, "card": about["card"], "runs": [], "rows": []}
        if path is not None and path.is_file():
            self._load(path, about["card"])
        self.body["runs"].append({"command": command("linattn", sys.argv[1:]), "date": datetime.now(UTC).date().isoformat(), **about})
        self.rows = {self._key(row): row for row in self.body["rows"]}

    def _load(self, path: Path, card: str) -> None:
        body = read_json(path)
        if body.get("schema") != SCHEMA or body.get("card") != card:
            raise ValueError(f"--out {path} holds other figures than those of {card}; name another file")
        if not all(isinstance(body.get(name), list) and all(isinstance(one, dict) for one in body[name]) for name in ("runs", "rows")):
            raise ValueError(f"--out {path} is damaged: runs and rows must be lists of objects; name another file")
        if not all(row.get("run") in range(len(body["runs"])) for row in body["rows"]):
            raise ValueError(f"--out {path} is damaged: a row names a run that the file lacks; name another file")
        self.body = body

    def _key(self, row: dict[str, Any]) -> tuple:
        return tuple(row.get(name) for name in self.key)

    def add(self, row: dict[str, Any]) -> None:
        """Add ``row``, marked with the run that made it."""
        self.rows[self._key(row)] = {**row, "run": len(self.body["runs"]) - 1}
        if time.monotonic() - self.written > EVERY:
            self.write()

    def write(self) -> None:
        """Write the file; runs without rows are dropped."""
        from linattn.report.folder import write_text

        if self.path is None:
            return
        rows = list(self.rows.values())
        used = sorted({row["run"] for row in rows} | {len(self.body["runs"]) - 1})
        runs = [self.body["runs"][i] for i in used]
        rows = [{**row, "run": used.index(row["run"])} for row in rows]
        write_text(self.path, json.dumps({**self.body, "runs": runs, "rows": rows}, indent=1) + "\n")
        self.written = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.write()


def about(device: str) -> dict[str, Any]:
    """Describe the card and its software."""
    from linattn.report.machine import machine

    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda needs an NVIDIA GPU, and torch sees none")
    card = torch.cuda.get_device_name(0) if device == "cuda" else "cpu"
    triton = version("triton") if find_spec("triton") else None
    return {"card": card, **machine(), "triton": triton, "cuda": torch.version.cuda}
