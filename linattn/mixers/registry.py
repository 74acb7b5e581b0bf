"""The register of mixers: by name, with paper, equation and exemptions. Third parties join by ``@register`` or an entry point."""

from __future__ import annotations

import difflib
import inspect
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import entry_points

from linattn.mixers.base import Mixer

KINDS = ("sequence", "cross", "grid", "resample", "feed-forward")
GROUP = "linattn.mixers"  # the entry point group: name = "package.module", which registers when it is imported


@dataclass(frozen=True)
class Info:
    """What is known of a registered mixer besides its code."""

    name: str
    title: str
    paper: str
    arxiv: str | None
    year: int
    seeds: tuple[str, ...]
    equation: str  # LaTeX
    kind: str
    causal: bool
    recurrent: bool  # the state does not grow with the sequence
    linear_in_values: bool  # the output is a mixing matrix times the values
    oracle: str  # the independent implementation that its test compares with
    cls: type[Mixer] = field(repr=False)
    exemptions: dict[str, str] = field(default_factory=dict)  # conformance check -> reason


_registered: dict[str, Info] = {}
_plugins_loaded = False


def register(
    name: str,
    *,
    title: str,
    paper: str = "",
    arxiv: str | None = None,
    year: int = 0,
    seeds: tuple[str, ...] = (),
    equation: str = "",
    kind: str = "sequence",
    causal: bool = True,
    recurrent: bool = True,
    linear_in_values: bool = True,
    oracle: str = "",
    exemptions: dict[str, str] | None = None,
) -> Callable[[type[Mixer]], type[Mixer]]:
    """Class decorator: make a mixer known by ``name`` to ``create``, models, the command line and the conformance suite."""
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, but came as {kind!r}")

    def add(cls: type[Mixer]) -> type[Mixer]:
        known = _registered.get(name)
        if known is not None and _path(known.cls) != _path(cls):
            raise ValueError(f"a mixer {name!r} is registered already, by {_path(known.cls)}")
        cls.info = Info(
            name=name, title=title, paper=paper, arxiv=arxiv, year=year, seeds=tuple(seeds), equation=equation, kind=kind, causal=causal,
            recurrent=recurrent, linear_in_values=linear_in_values, oracle=oracle, cls=cls, exemptions=dict(exemptions or {}),
        )  # fmt: skip
        _registered[name] = cls.info
        return cls

    return add


def _path(cls: type[Mixer]) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def available() -> list[str]:
    """Names of all registered mixers, third parties' included."""
    _load_plugins()
    return sorted(_registered)


def info(name: str) -> Info:
    """What is known of the mixer ``name``.

    Raises:
        ValueError: with the names that there are.
    """
    _load_plugins()
    if name not in _registered:
        close = difflib.get_close_matches(name, _registered, 1)
        hint = f"; did you mean {close[0]!r}?" if close else ";"
        raise ValueError(f"no mixer is called {name!r}{hint} there are {', '.join(sorted(_registered))}")
    return _registered[name]


def create(name: str, *, dim: int, **options) -> Mixer:
    """A new mixer ``name`` of width ``dim``; every option but ``dim`` has a default that is good for multiples of 32.

    Raises:
        ValueError: for a name that is not registered, and for sizes that do not divide.
        TypeError: for an option that the mixer does not have.
    """
    cls = info(name).cls
    known = [option for option in inspect.signature(cls).parameters if option != "dim"]
    for option in options:
        if option not in known:
            raise TypeError(f"mixer {name!r} has no option {option!r}; it has: {', '.join(known) or 'none but dim'}")
    mixer = cls(dim=dim, **options)
    mixer.dim = dim
    return mixer


def _load_plugins() -> None:
    """Import the modules that installed packages offer; one that fails is reported and does not take the others down."""
    global _plugins_loaded
    if _plugins_loaded:
        return
    _plugins_loaded = True
    for point in entry_points(group=GROUP):
        try:
            point.load()
        except Exception as error:  # whatever a stranger's module raises
            warnings.warn(f"mixer plugin {point.name} ({point.value}) did not load: {error}", stacklevel=3)
