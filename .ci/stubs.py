"""Write linattn/mixers/__init__.pyi: the class of every mixer of the library, and ``create`` with the options of each by name.

python .ci/stubs.py
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from linattn.mixers import registry
from linattn.mixers.registry import Info

PACKAGE = Path(__file__).resolve().parent.parent / "linattn" / "mixers"
STUB = PACKAGE / "__init__.pyi"
HEADER = '''"""Mixers and their options, for type checkers and editors. Written by `make stubs`."""

from collections.abc import Sequence
from typing import Any, Literal, overload

'''


def stub() -> str:
    """Text of the stub file."""
    registry.classes()  # imports them
    infos = [registry.info(name) for name in registry.available()]
    own = [info for info in infos if info.cls.__module__.startswith("linattn.")]
    lines = re.findall(r"^from linattn\S+ import (?!create as).*$", (PACKAGE / "__init__.py").read_text(encoding="utf-8"), re.M)
    lines += sorted(f"from {info.cls.__module__} import {info.cls.__name__} as {info.cls.__name__}" for info in own)
    overloads = [*map(overload, own), "@overload\ndef create(name: str, *, dim: int, **options: Any) -> Mixer: ..."]
    return HEADER + "\n".join(lines) + "\n\n" + "\n".join(overloads) + "\n"


def overload(info: Info) -> str:
    """``create`` of one mixer."""
    options = [argument(p) for p in inspect.signature(info.cls).parameters.values() if p.name != "dim"]
    words = ", ".join([f'name: Literal["{info.name}"]', "*", "dim: int", *options])
    return f"@overload\ndef create({words}) -> {info.cls.__name__}: ..."


def argument(parameter: inspect.Parameter) -> str:
    """One option with its type and its default."""
    default = "" if parameter.default is parameter.empty else f" = {parameter.default!r}"
    return f"{parameter.name}: {parameter.annotation}{default}"


def main() -> None:
    """Write the file."""
    STUB.write_text(stub(), encoding="utf-8")


if __name__ == "__main__":
    main()
