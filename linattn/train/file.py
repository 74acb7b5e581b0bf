"""Options of a training from a YAML or TOML file."""

from __future__ import annotations

import re
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

from linattn.arguments import suggestion
from linattn.train.options import TrainOptions


def read_options(path: Path) -> dict[str, Any]:
    """Read values for fields of :class:`TrainOptions` from ``path``, which ends in .toml, .yaml or .yml.

    Names may have hyphens, as on the command line; a list of one value may omit its brackets.

    Raises:
        OSError: if the file cannot be read.
        ValueError: for another suffix, a damaged file, and unknown names.
    """
    content = _parsed(path)
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        raise ValueError(f"{path} must hold names and values of options, but holds {type(content).__name__}")
    types = {f.name: str(f.type) for f in fields(TrainOptions)}
    found: dict[str, Any] = {}
    for written, value in content.items():
        name = written.replace("-", "_")
        if name not in types:
            raise ValueError(f"{path}: there is no option {written!r}{suggestion(name, types)}")
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
            return _yaml(text) or {}
    except Exception as error:  # TOML and YAML parsers raise different types
        if isinstance(error, ImportError):
            raise
        raise ValueError(f"{path} is damaged: {' '.join(str(error).split())}") from None
    raise ValueError(f"{path} must end in .toml, .yaml or .yml")


def _yaml(text: str) -> Any:
    """Parse YAML with the numbers of its version 1.2, where ``1e-3`` is one. PyYAML has those of 1.1, where it is a string."""
    import yaml  # type: ignore[import-untyped]

    class Loader(yaml.SafeLoader):
        """Adds a rule to a copy of the safe loader's rules."""

    number = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$")
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+.0123456789"))
    return yaml.load(text, Loader)  # noqa: S506  a safe loader
