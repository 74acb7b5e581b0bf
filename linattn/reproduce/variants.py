"""Notation of mixers with options in studies and comparisons: a registered name and options of its constructor.

``deltanet`` or ``deltanet:negative_eigenvalues=true`` or ``softmax:window=16:heads=2``: any registered mixer, any of its options.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Any, get_args, get_origin

import torch

from linattn import mixers
from linattn.arguments import suggestion

# Short forms of options in plots.
_SHORT = {
    "negative_eigenvalues true": "β<2",
    "conv_width 1": "",
    "conv_width": "conv",
    "heads 8": "",
    "state_size": "K",
    "head_dim": "V",
    "substeps": "n",
}


@dataclass(frozen=True)
class Variant:
    """A mixer with options; ``text`` is its notation and ``label`` its name in plots."""

    text: str
    name: str
    options: dict[str, Any]

    @property
    def label(self) -> str:
        """The name and, in short form, the given options."""
        said = [self.name]
        for option, value in self.options.items():
            pair = f"{option} {json.dumps(value) if isinstance(value, bool) else value}"
            said.append(_SHORT.get(pair, f"{_SHORT.get(option, option)} {value}"))
        return " ".join(filter(None, said))

    @property
    def mixer_options(self) -> dict[str, dict[str, Any]]:
        """Options by mixer name, as in configs of models."""
        return {self.name: self.options} if self.options else {}

    @property
    def windowed(self) -> bool:
        """True if the mixer is softmax over the latest tokens only."""
        return self.name == "softmax" and self.options.get("window") is not None


def everyone() -> tuple[str, ...]:
    """All mixers that a language model can have."""
    return tuple(name for name in mixers.available() if (known := mixers.info(name)).kind == "sequence" and known.causal)


def label(mixer: str) -> str:
    """Label of ``mixer`` in plots and tables; the name itself if it is not a mixer, since a study may compare other things too."""
    try:
        return parse(mixer).label
    except ValueError:
        return mixer


def parse(text: str) -> Variant:
    """Parse the notation ``text`` of a mixer.

    Raises:
        ValueError: for an unknown mixer or option, a mixer that no language model can have, invalid notation, and
            a value of another type than the option's.
    """
    name, *pairs = (part.strip() for part in text.split(":"))
    known = mixers.info(name)
    if known.kind != "sequence" or not known.causal:
        raise ValueError(f"mixers must be causal sequence mixers, but {name!r} is not one")
    options: dict[str, Any] = {}
    wanted = _parameters(known.cls)
    has = [option for option in wanted if option != "dim"]
    for pair in pairs:
        option, found, value = pair.partition("=")
        if not found:
            raise ValueError(f"a mixer must be written as name:option=value, but came as {text!r}")
        if option not in has:
            raise ValueError(f"mixer {name!r} has no option {option!r}{suggestion(option, has)}")
        options[option] = _value(value)
        if not _fits(options[option], type_ := wanted[option].annotation):
            raise ValueError(f"{option} of mixer {name!r} must be {inspect.formatannotation(type_)}, but came as {value!r}")
    return Variant(text, name, options)


def check(text: str, dim: int) -> None:
    """Raise ValueError for an invalid option or width of the mixer ``text``; allocates no memory."""
    variant = parse(text)
    if not variant.options:  # the defaults fit every width of a study
        return
    with torch.device("meta"):
        try:
            mixers.create(variant.name, dim=dim, **variant.options)
        except ValueError as error:
            raise ValueError(f"{text} cannot be a mixer of width {dim}: {error}") from None


def _value(text: str) -> Any:
    """Parse JSON; other text is returned unchanged."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _parameters(cls: type) -> Mapping[str, inspect.Parameter]:
    """Parameters of the mixer's constructor, with annotations as text if they cannot be resolved."""
    try:
        return inspect.signature(cls, eval_str=True).parameters
    except NameError:
        return inspect.signature(cls).parameters


def _fits(value: Any, annotation: Any) -> bool:
    """True if ``value`` has the type ``annotation``; the mixer checks the items of a list."""
    if isinstance(annotation, UnionType):
        return any(_fits(value, one) for one in get_args(annotation))
    kind = get_origin(annotation) or annotation
    if kind is float:
        return type(value) in (int, float)
    return type(value) is kind or kind not in (int, bool, str, dict, NoneType)
