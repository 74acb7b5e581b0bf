"""Write the site: pages, one style sheet, one script; nothing else is needed to open it from disk."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from types import ModuleType

import linattn
from linattn.atlas.bundle import bundle
from linattn.atlas.look import Look, look
from linattn.atlas.page import Page, render
from linattn.mixers import available, info
from linattn.report.folder import write_text

# The parts of the site in the order of the navigation. Each is a module here with ENTRY, an Entry, and pages(atlas), which yields Pages.
SECTIONS = ("story", "systems", "triangle", "price", "capacity", "lab", "slips")
SCHEMA = "linattn.atlas"
MARK = "atlas.json"


@dataclass(frozen=True)
class Atlas:
    """What the parts of the site are made from.

    Args:
        names: the systems that are shown, of every kind.
        results: the folder of measured results (``benchmarks/results`` of a checkout), or None.
    """

    names: tuple[str, ...]
    results: Path | None = None

    @cached_property
    def looks(self) -> dict[str, Look]:
        """Every system on the running sentence, computed once."""
        return {name: look(name) for name in self.names}

    def measured(self, pattern: str) -> Iterator[dict]:
        """The result files whose names match ``pattern``, such as ``ops-*.json``."""
        for path in sorted(self.results.glob(pattern)) if self.results else ():
            yield json.loads(path.read_text(encoding="utf-8"))


def sections() -> list[ModuleType]:
    """The modules of :data:`SECTIONS`."""
    return [import_module(f"linattn.atlas.{name}") for name in SECTIONS]


def files(atlas: Atlas) -> Iterator[tuple[str, str]]:
    """Every file of the site: path and content."""
    parts = sections()
    entries = [part.ENTRY for part in parts]
    yield "atlas.css", Path(__file__).with_name("style.css").read_text(encoding="utf-8")
    yield "atlas.js", bundle()
    home = import_module("linattn.atlas.home")
    pages: Iterator[Page] = (page for part in (home, *parts) for page in part.pages(atlas))
    for page in pages:
        yield page.path, render(page, entries)


def build(folder: Path | str, *, names: Sequence[str] | None = None, results: Path | str | None = None) -> Path:
    """Write the atlas into ``folder`` and return its first page.

    Args:
        folder: a new or an empty one, or one with an earlier atlas, which is replaced.
        names: the systems to show; all that are registered if None.
        results: measured results to draw beside the theory; those of the checkout, if this is one, if None.

    Raises:
        ValueError: for a name that is not registered, and for a folder that holds something else.
    """
    folder = Path(folder)
    chosen = tuple(available()) if names is None else tuple(info(name).name for name in names)
    atlas = Atlas(chosen, _results(results))
    _clear(folder)
    written = []
    for path, content in files(atlas):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        write_text(folder / path, content)
        written.append(path)
    mark = {"schema": SCHEMA, "linattn": linattn.__version__, "files": written}
    write_text(folder / MARK, json.dumps(mark, indent=1) + "\n")
    return folder / "index.html"


def _results(given: Path | str | None) -> Path | None:
    """``given``, or where a checkout keeps its results."""
    if given is not None:
        if not Path(given).is_dir():
            raise ValueError(f"results must be a folder, but {given} is none")
        return Path(given)
    own = Path(linattn.__file__).parents[1] / "benchmarks" / "results"
    return own if own.is_dir() else None


def _clear(folder: Path) -> None:
    """Take an earlier atlas away, file by file; refuse a folder that holds anything else."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"the atlas needs a folder, but {folder} is a file")
    folder.mkdir(parents=True, exist_ok=True)
    if not any(folder.iterdir()):
        return
    try:
        mark = json.loads((folder / MARK).read_text(encoding="utf-8"))
        old = [str(path) for path in mark["files"]] if mark["schema"] == SCHEMA else None
    except (OSError, ValueError, KeyError, TypeError):
        old = None
    if old is None:
        raise ValueError(f"{folder} holds files that are no atlas; name an empty or a new folder")
    root = folder.resolve()
    for path in [*old, MARK]:
        if (root / path).resolve().is_relative_to(root):
            (root / path).unlink(missing_ok=True)
