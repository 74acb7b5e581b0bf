"""Build of the site: pages, one style sheet and one script, which work from disk without a server."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from functools import cached_property
from importlib import import_module
from pathlib import Path
from types import ModuleType

import linattn
from linattn.atlas.bundle import bundle
from linattn.atlas.inspection import Inspection, inspect_mixer
from linattn.atlas.page import Page, render
from linattn.mixers import available, info
from linattn.report.folder import write_text
from linattn.report.progress import Progress
from linattn.state import empty, only_writer, read_json

# The parts of the site in the order of the navigation. Each is a module here with ENTRY, an Entry, and pages(atlas), which yields Pages.
SECTIONS = ("begin", "story", "methods", "systems", "triangle", "cost_page", "capacity", "choose", "lab", "pitfalls")
SCHEMA = "linattn.atlas"
MARK = "atlas.json"
FIRST_PAGE = "index.html"


@dataclass(frozen=True)
class Atlas:
    """Input of the parts of the site.

    Args:
        names: the systems to show, of every kind.
        results: the folder of measured results (``benchmarks/results`` of a checkout), or None.
        progress: receives the progress.
    """

    names: tuple[str, ...]
    results: Path | None = None
    progress: Progress = field(default_factory=lambda: Progress(shown=False))

    @cached_property
    def inspections(self) -> dict[str, Inspection]:
        """Inspections of all systems on the running sentence, computed once."""
        return {name: inspect_mixer(name) for name in self.each("inspecting", self.names)}

    def each(self, doing: str, names: Sequence[str]) -> Iterator[str]:
        """Iterate over ``names`` with progress: a bar on a terminal, a line elsewhere."""
        if not self.progress.bars:
            self.progress.say(f"{doing} {len(names)} system{'s' * (len(names) != 1)}")
            yield from names
            return
        with self.progress.counted(doing, len(names)) as tell:
            for name in names:
                yield name
                tell(name)

    def measured(self, pattern: str) -> Iterator[tuple[Path, dict]]:
        """Result files whose names match ``pattern``, such as ``ops-*.json``, with their contents."""
        return ((path, body) for path, body in self._bodies if fnmatch(path.name, pattern))

    @cached_property
    def _bodies(self) -> list[tuple[Path, dict]]:
        """All result files, read once."""
        paths = sorted(self.results.glob("*.json")) if self.results else []
        return [(path, read_json(path)) for path in paths]


def sections() -> list[ModuleType]:
    """Modules of :data:`SECTIONS`."""
    return [import_module(f"linattn.atlas.{name}") for name in SECTIONS]


def files(atlas: Atlas) -> Iterator[tuple[str, str]]:
    """Generate every file of the site: path and content."""
    parts = sections()
    entries = [part.ENTRY for part in parts]
    yield "atlas.css", Path(__file__).with_name("style.css").read_text(encoding="utf-8")
    yield "atlas.js", bundle()
    home = import_module("linattn.atlas.home")
    pages: Iterator[Page] = (page for part in (home, *parts) for page in part.pages(atlas))
    for page in pages:
        yield page.path, render(page, entries)


def build(folder: Path | str, *, names: Sequence[str] | None = None, results: Path | str | None = None, progress: bool = False) -> Path:
    """Write the atlas into ``folder`` and return its first page.

    Files are written after all pages are made. An earlier atlas is replaced file by file, other files are left alone; the
    first page comes last, so that :func:`serve` ignores an interrupted build and the next build replaces it.

    Args:
        folder: a new or an empty one, or one with an earlier atlas, which is replaced.
        names: the systems to show; all that are registered if None.
        results: measured results to draw beside the theory; those of the checkout, if this is one, if None.
        progress: show the progress on stderr.

    Raises:
        ValueError: for no names or unregistered ones, a damaged file of results, a folder with other files, a page that would replace a
            file that is not the atlas's or follow a link out of the folder, and, at once, if another process is writing to it.
    """
    folder = Path(folder)
    if names is not None and not names:
        raise ValueError("an atlas needs at least one system, but names came empty")
    chosen = tuple(available()) if names is None else tuple(dict.fromkeys(info(name).name for name in names))
    atlas = Atlas(chosen, _results(results), Progress(progress))
    _earlier(folder)
    list(atlas.measured("*"))  # raises for damaged results before the folder is created
    with only_writer(folder):
        earlier = _earlier(folder)
        _write(folder, dict(files(atlas)), earlier)
    return folder / FIRST_PAGE


def _results(given: Path | str | None) -> Path | None:
    """Folder of results: ``given``, or the checkout's own."""
    if given is not None:
        if not Path(given).is_dir():
            raise ValueError(f"results must be a folder, but {given} is not one")
        return Path(given)
    own = Path(linattn.__file__).parents[1] / "benchmarks" / "results"
    return own if own.is_dir() else None


def _earlier(folder: Path) -> list[str]:
    """Files of an earlier atlas in ``folder``; raise ValueError if it holds anything else."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"the atlas needs a folder, but {folder} is a file")
    if empty(folder):
        return []
    try:
        mark = json.loads((folder / MARK).read_text(encoding="utf-8"))
        if mark["schema"] == SCHEMA:
            return [str(path) for path in mark["files"]]
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise ValueError(f"{folder} holds files that do not belong to an atlas: choose an empty or a new folder")


def _write(folder: Path, made: Mapping[str, str], earlier: Sequence[str]) -> None:
    """Replace the ``earlier`` files by those ``made``, each atomically."""
    root = folder.resolve()
    for path in made:
        if not (root / path).resolve().is_relative_to(root):
            raise ValueError(f"{folder / path} leads out of the folder: remove that link or choose another folder")
        if path not in earlier and (root / path).exists():
            raise ValueError(f"{folder / path} exists but does not belong to the atlas: choose an empty or a new folder")
    root.mkdir(parents=True, exist_ok=True)
    _mark(root, {*earlier, *made})
    for path in {*earlier} - ({*made} - {FIRST_PAGE}):
        if (root / path).resolve().is_relative_to(root):
            (root / path).unlink(missing_ok=True)
    for path in sorted(made, key=lambda path: path == FIRST_PAGE):
        (root / path).parent.mkdir(exist_ok=True)
        write_text(root / path, made[path])
    _mark(root, made)


def _mark(root: Path, names: Iterable[str]) -> None:
    """Write the list of the atlas's files, so that a later build may replace them."""
    mark = {"schema": SCHEMA, "linattn": linattn.__version__, "files": sorted(names)}
    write_text(root / MARK, json.dumps(mark, indent=1) + "\n")
