"""Registration of the models with transformers' Auto classes, in either order of import and without importing transformers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def arrange() -> None:
    """Register the models now if transformers is imported, otherwise when it is."""
    if sys.modules.get("transformers") is not None:
        _register()
    elif "transformers" not in sys.modules:  # None blocks its import
        sys.meta_path.insert(0, _WhenImported)


def _register() -> None:
    """Register the models with transformers' Auto classes."""
    try:
        import_module("linattn.hf")
    except ImportError as error:  # optional for linattn itself
        import warnings

        warnings.warn(f"linattn.hf does not work with this version of transformers: {error}", stacklevel=3)


class _WhenImported:
    """Import finder that registers the models at the end of transformers' import."""

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
