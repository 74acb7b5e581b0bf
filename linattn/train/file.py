"""Options of a training from a YAML or TOML file."""

from __future__ import annotations

import difflib
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

from linattn.train.options import TrainOptions


def read_options(path: Path) -> dict[str, Any]:
    """Values of the fields of :class:`TrainOptions` in ``path``, a file that ends in .toml, .yaml or .yml.

    Names may be written with hyphens as on the command line; a list of one may be written without its brackets.

    Raises:
        OSError: if it cannot be read.
        ValueError: for another file, a damaged one, and names that are no fields.
    """
    content = _parsed(path)
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        raise ValueError(f"{path} must hold names and values of options, but holds {type(content).__name__}")
    types = {f.name: str(f.type) for f in fields(TrainOptions)}
    found: dict[str, Any] = {}
    for written, value in content.items():
        name = written.replace("-", "_")
        if name not in types:
            close = difflib.get_close_matches(name, types, 1)
            raise ValueError(f"{path}: there is no option {written!r}" + (f"; did you mean {close[0]!r}?" if close else ""))
        if types[name].startswith("tuple"):
            value = tuple(value) if isinstance(value, list) else (value,)
        found[name] = Path(value) if name == "out" and isinstance(value, str) else value
    return found


def _parsed(path: Path) -> Any:
    text = path.read_text(encoding="utf-8")
    try:
        if path.suffix == ".toml":
            return tomllib.loads(text)
        if path.suffix in (".yaml", ".yml"):
            import yaml  # type: ignore[import-untyped]

            return yaml.safe_load(text) or {}
    except Exception as error:  # two packages' own
        if isinstance(error, ImportError):
            raise
        raise ValueError(f"{path} is damaged: {' '.join(str(error).split())}") from None
    raise ValueError(f"{path} must end in .toml, .yaml or .yml")
