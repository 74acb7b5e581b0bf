"""Other libraries' code for comparison: wheels from PyPI, unpacked separately and loaded by file path.

Nothing is installed or put on ``sys.path``: with ``fla`` importable, transformers' Qwen3-Next expects a GPU and crashes on a CPU. The
folder is ``$LINATTN_ORACLES``, else ``.cache/oracles`` of the repository. Without a network tests that need a wheel fail with a message;
``LINATTN_OFFLINE=1`` skips them.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

from linattn.bench import wheels


def folder() -> Path:
    """Folder of unpacked wheels."""
    return Path(os.environ.get("LINATTN_ORACLES") or Path(__file__).parents[2] / ".cache" / "oracles")


@cache
def path(requirement: str) -> Path:
    """The unpacked wheel of ``requirement``, for example ``"fla-core==0.6.0"``; downloaded on first use."""
    if os.environ.get("LINATTN_OFFLINE") == "1" and not (folder() / requirement.replace("==", "-")).is_dir():
        pytest.skip(f"{requirement} is not in {folder()}, and LINATTN_OFFLINE=1", allow_module_level=True)
    try:
        return wheels.path(requirement, folder())
    except OSError as error:
        pytest.fail(f"{error}; without a network set LINATTN_OFFLINE=1", pytrace=False)


def module(requirement: str, file: str) -> ModuleType:
    """Load the single file ``file`` of a wheel as a module under a private name; relative imports deliberately fail."""
    return _load(path(requirement) / file)


@cache
def _load(file: Path) -> ModuleType:
    name = f"_linattn_oracle_{hashlib.sha256(str(file).encode()).hexdigest()[:16]}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or not file.is_file():
        raise FileNotFoundError(f"the wheel has no file {file}")
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[name] = loaded  # dataclasses and pickling look a class's module up there
    spec.loader.exec_module(loaded)
    return loaded
