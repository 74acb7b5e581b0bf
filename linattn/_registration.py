"""transformers' Auto classes know our models, whichever of the two packages is imported first, and neither imports the other sooner."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def arrange() -> None:
    """Register our models, now if transformers is there and else when it is imported."""
    if sys.modules.get("transformers") is not None:
        _register()
    elif "transformers" not in sys.modules:  # where None is there, it is not to be had
        sys.meta_path.insert(0, _WhenImported)


def _register() -> None:
    """Let transformers' Auto classes know our models."""
    try:
        import_module("linattn.hf")
    except ImportError as error:  # linattn itself does without
        import warnings

        warnings.warn(f"this transformers does not serve linattn.hf: {error}", stacklevel=3)


class _WhenImported:
    """A finder that has transformers register our models at the end of its own import."""

    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != "transformers":
            return None
        others = (finder for finder in sys.meta_path if finder is not cls)
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = partial(_then_register, spec.loader.exec_module)  # type: ignore[method-assign]
        return spec


def _then_register(execute: Callable[[ModuleType], None], module: ModuleType) -> None:
    execute(module)
    _register()
