"""Sources of text: the user's files, or the source of Python's standard library, available everywhere."""

from __future__ import annotations

import glob
import os
import sysconfig
from collections.abc import Sequence
from pathlib import Path

_NOT_SOURCE = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
_MAGIC = set("*?[")


def standard_library() -> list[bytes]:
    """List the standard library's Python files in the order of their names, without tests."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files: list[Path] = []
    for folder, below, names in os.walk(root):
        below[:] = [name for name in below if name not in _NOT_SOURCE]
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    texts = [file.read_bytes() for file in sorted(files, key=lambda f: f.relative_to(root).as_posix())]
    return [text for text in texts if _undecodable(text) is None]


def files(paths: Sequence[str | os.PathLike[str]]) -> list[Path]:
    """Expand ``paths`` in their order: patterns such as ``texts/*.txt`` become the sorted files that match."""
    found: list[Path] = []
    for path in [os.fspath(p) for p in paths]:
        if set(path) & _MAGIC and not Path(path).exists():
            matches = sorted(Path(match) for match in glob.glob(path, recursive=True) if Path(match).is_file())
            if not matches:
                raise FileNotFoundError(f"no file matches {path!r}")
            found += matches
        else:
            found.append(Path(path))
    return found


def read(path: Path) -> bytes:
    """Read the UTF-8 text in ``path``.

    Raises:
        OSError: if it is missing, a folder, or cannot be read.
        ValueError: if it is empty or not UTF-8.
    """
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; name text files, or a pattern such as {path / '*.txt'}")
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist; name text files, or a pattern such as 'texts/*.txt'")
    text = path.read_bytes()
    if not text:
        raise ValueError(f"{path} is empty")
    if (at := _undecodable(text)) is not None:
        raise ValueError(f"{path} is not UTF-8 text: byte {at} is 0x{text[at]:02x}; convert it first (iconv -t utf-8)")
    return text


def _undecodable(text: bytes) -> int | None:
    try:
        text.decode()
    except UnicodeDecodeError as error:
        return error.start
    return None


def left_out(count: int, first: Sequence[int], form: str) -> str:
    """Message about ``count`` unreadable lines, with the ``first`` line numbers and the expected ``form``; empty if there are none."""
    if not count:
        return ""
    lines = ", ".join(map(str, first)) + (", ..." if count > len(first) else "")
    return f"{'1 line was' if count == 1 else f'{count:,} lines were'} left out (line {lines}): {form}"
