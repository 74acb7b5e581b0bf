"""The register of mixers: by name, with paper, equation and exemptions. Third parties join by ``@register`` or an entry point."""

from __future__ import annotations

import difflib
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
    exemptions: dict[str, str] = field(default_factory=dict)  # conformance check -> reason
    cls: type[Mixer] | None = None


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
        if known is not None and known.cls is not None and known.cls.__qualname__ != cls.__qualname__:
            raise ValueError(f"mixer {name!r} is already registered by {known.cls.__module__}.{known.cls.__qualname__}")
        cls.info = Info(
            name, title, paper, arxiv, year, tuple(seeds), equation, kind, causal, recurrent, linear_in_values, oracle,
            dict(exemptions or {}), cls,
        )  # fmt: skip
        _registered[name] = cls.info
        return cls

    return add


def available() -> list[str]:
    """Names of all registered mixers, third parties' included."""
    _load_plugins()
    return sorted(_registered)


def info(name: str) -> Info:
    """What is known of the mixer ``name``."""
    _load_plugins()
    if name not in _registered:
        close = difflib.get_close_matches(name, _registered, 1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"no mixer is called {name!r}{hint} There are: {', '.join(sorted(_registered))}")
    return _registered[name]


def create(name: str, *, dim: int, **options) -> Mixer:
    """A new mixer ``name`` of width ``dim``; every option but ``dim`` has a default that is good for multiples of 32."""
    return info(name).cls(dim=dim, **options)


def _load_plugins() -> None:
    """Import the modules that installed packages offer; one that fails is reported and does not take the others down."""
    global _plugins_loaded
    if _plugins_loaded:
        return
    _plugins_loaded = True
    for point in entry_points(group=GROUP):
        try:
            point.load()
        except Exception as error:
            import warnings

            warnings.warn(f"mixer plugin {point.name} ({point.value}) did not load: {error}", stacklevel=3)
