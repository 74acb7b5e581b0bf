"""Registry of mixers by name, with paper, equation and exemptions. Third parties register by ``@register`` or an entry point."""

from __future__ import annotations

import inspect
import pkgutil
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from importlib import import_module
from importlib.metadata import entry_points
from threading import RLock
from typing import Any, TypedDict, Unpack

import torch

from linattn.arguments import beyond_memory, described, mismatch, suggestion, typed, whole, written
from linattn.mixers.base import Mixer
from linattn.mixers.taxonomy import FAMILIES

KINDS = ("sequence", "cross", "grid", "resample", "feed-forward")
GROWTHS = ("n", "n log n", "n^1.5", "n^2")  # of time and memory with n tokens, other sizes constant
SYMMETRIES = ("permutation", "shift")
GROUP = "linattn.mixers"  # the entry point group: name = "package.module", which registers when it is imported


class About(TypedDict, total=False):
    """Keywords of :func:`register` besides name and title; :class:`Info` explains each."""

    paper: str
    arxiv: str | None
    year: int
    seeds: tuple[str, ...]
    equation: str
    kind: str
    causal: bool
    recurrent: bool
    linear_in_values: bool
    oracle: str
    exemptions: dict[str, str] | None
    growth: str | None
    symmetry: str | None
    families: tuple[str, ...]
    chinese: dict[str, str] | None


@dataclass(frozen=True, kw_only=True)
class Info:
    """Facts about a registered mixer besides its code."""

    name: str
    title: str
    paper: str = ""
    arxiv: str | None = None
    year: int = 0
    seeds: tuple[str, ...] = field(default=(), repr=False)  # introductions that name it: keys of documents.DOCUMENTS
    equation: str = ""  # LaTeX
    kind: str = "sequence"
    causal: bool = True
    recurrent: bool = True  # the state does not grow with the sequence
    linear_in_values: bool = True  # the output is a mixing matrix times the values
    oracle: str = ""  # the independent implementation that its test compares with
    cls: type[Mixer] = field(repr=False)
    exemptions: dict[str, str] = field(default_factory=dict)  # conformance check -> reason
    growth: str = "n"  # of time and memory with the number of tokens, one of GROWTHS
    symmetry: str | None = None  # equivariance where it is not causal: to permutations of tokens, or to shifts, far from the ends
    families: tuple[str, ...] = ()  # from taxonomy.FAMILIES, if they differ from the FAMILY of its package
    chinese: dict[str, str] = field(default_factory=dict, repr=False)  # English text of a field, or a clause of it -> Chinese

    @property
    def options(self) -> list[str]:
        """Options of ``create`` besides ``dim``."""
        return [option for option in inspect.signature(self.cls).parameters if option != "dim"]

    @property
    def resumable(self) -> bool:
        """True if the mixer continues from a state token by token, as a language model needs."""
        return self.kind == "sequence" and self.causal

    @property
    def bidirectional(self) -> bool:
        """True for a sequence mixer whose tokens read all others, at least with ``causal=False``."""
        return self.kind == "sequence" and (not self.causal or "causal" in self.options)


_PACKAGES = ("linattn.mixers", "linattn.ffn")  # all files in them are imported when a mixer is looked up by name
_registered: dict[str, Info] = {}
_loading = RLock()
_loaded = False


@typed
def register(name: str, *, title: str, **about: Unpack[About]) -> Callable[[type[Mixer]], type[Mixer]]:
    """Register the decorated mixer class as ``name`` for ``create``, models, the command line and the conformance suite.

    Args:
        name: name of the mixer there.
        title: name in the literature.
        about: the fields of :class:`Info`: paper, arxiv, year, seeds, equation, kind, causal, recurrent, linear_in_values, oracle,
            exemptions, growth, symmetry, families and chinese. ``growth`` defaults to "n", and to "n^2" for a mixer with
            ``recurrent=False``. ``families`` are kinds of ``linattn.mixers.taxonomy.FAMILIES``, where they differ from that of
            the mixer's folder. ``chinese`` holds the Chinese of ``title``, ``oracle``, the words of ``equation`` and reasons of
            ``exemptions``, or of clauses of them, for the atlas.

    Raises:
        TypeError: for a field that :class:`Info` does not have, and for values of another type.
        ValueError: for kinds, growths, symmetries and families that do not exist, and a name in use.
    """
    facts = _facts(about)

    def add(cls: type[Mixer]) -> type[Mixer]:
        old = _registered.get(name)
        if old is not None and _path(old.cls) != _path(cls):
            raise ValueError(f"a mixer {name!r} is registered already, by {_path(old.cls)}")
        cls.info = Info(name=name, title=title, cls=cls, **facts)
        cls.causal = cls.info.causal
        _registered[name] = cls.info
        return cls

    return add


def _facts(about: Mapping[str, Any]) -> dict[str, Any]:
    """Convert ``about`` to the checked fields of :class:`Info`; None stands for a field's default."""
    types = {f.name: written(f.type) for f in fields(Info)}
    facts = {argument: value for argument, value in about.items() if value is not None}
    for argument, value in facts.items():
        if argument not in About.__annotations__:
            raise TypeError(f"register has no argument {argument!r}; it has: name, title, {', '.join(About.__annotations__)}")
        if (told := mismatch(argument, value, types[argument], {})) is not None:
            raise TypeError(told)
    choices = {"kind": KINDS, "growth": GROWTHS, "symmetry": SYMMETRIES}
    asked = [(argument, facts[argument], known) for argument, known in choices.items() if argument in facts]
    for argument, value, known in [*asked, *(("families", family, FAMILIES) for family in facts.get("families", ()))]:
        if value not in known:
            raise ValueError(f"{argument} must be one of {', '.join(known)}, but came as {value!r}")
    growth = "n" if facts.get("recurrent", True) else "n^2"
    return {"growth": growth} | {argument: _copied(value) for argument, value in facts.items()}


def _copied(value: Any) -> Any:
    """Copy ``value``, a list as a tuple, so that registered facts cannot change."""
    return tuple(value) if isinstance(value, list) else dict(value) if isinstance(value, dict) else value


def _path(cls: type[Mixer]) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def available() -> list[str]:
    """Names of all registered mixers, third parties' included."""
    _load()
    return sorted(_registered)


def classes() -> dict[str, type[Mixer]]:
    """Classes of the library's own mixers, by the names of the classes."""
    _load()
    return {entry.cls.__name__: entry.cls for entry in _registered.values() if entry.cls.__module__.startswith(_PACKAGES)}


def info(name: str) -> Info:
    """Facts about the mixer ``name``.

    Raises:
        ValueError: for a name that is not registered; the message names the closest one.
    """
    _load()
    if not isinstance(name, str):
        raise TypeError(f"name must be that of a mixer, a string, but came as {described(name)}")
    if name not in _registered:
        listed = "; `linattn list` and linattn.mixers.available() show all of them"
        raise ValueError(f"no mixer is called {name!r}{suggestion(name, sorted(_registered), listed)}")
    return _registered[name]


def create(name: str, *, dim: int, **options: Any) -> Mixer:
    """Create a mixer ``name`` of width ``dim``; every other option has a default that is good for multiples of 32.

    If torch's default dtype is half precision, all parameters but ``keep_float32`` have it.

    Raises:
        ValueError: for a name that is not registered, for values of a wrong type, and for sizes below 1 or that do not
            divide.
        TypeError: for an option that the mixer does not have.
    """
    known = info(name)
    whole("dim", dim, 1)
    for option in options:
        if option not in known.options:
            otherwise = f"; its options are: {', '.join(['dim', *known.options])}"
            raise TypeError(f"mixer {name!r} has no option {option!r}{suggestion(option, known.options, otherwise)}")
    _check_types(known, options)
    dtype = torch.get_default_dtype()
    parameter_dtype = torch.promote_types(dtype, torch.float32)
    torch.set_default_dtype(parameter_dtype)  # for time constants, and since torch has no orthogonal init in half precision
    try:
        mixer = known.cls(dim=dim, **options)
    except (RuntimeError, TypeError, MemoryError) as error:
        if not beyond_memory(error):
            raise
        raise ValueError(f"dim = {dim} and options = {options} need more memory than there is") from error
    finally:
        torch.set_default_dtype(dtype)
    mixer.dim = dim
    return mixer if dtype == parameter_dtype else mixer.to(dtype)


def _check_types(known: Info, options: dict[str, Any]) -> None:
    """Raise ValueError for values of other types than the constructor's annotations, if a file of options may hold those types."""
    for option, value in options.items():
        annotation = inspect.signature(known.cls).parameters[option].annotation
        if (told := mismatch(option, value, written(annotation), {})) is not None:
            raise ValueError(told)


def _load() -> None:
    """Import the library's mixers and those of installed packages; a plugin that fails is reported and skipped."""
    global _loaded
    with _loading:
        if _loaded:
            return
        _loaded = True
        for home in map(import_module, _PACKAGES):
            for module in pkgutil.walk_packages(home.__path__, f"{home.__name__}."):
                import_module(module.name)
        for point in entry_points(group=GROUP):
            try:
                point.load()
            except Exception as error:  # third-party modules may raise anything
                warnings.warn(f"mixer plugin {point.name} ({point.value}) did not load: {error}", stacklevel=3)
