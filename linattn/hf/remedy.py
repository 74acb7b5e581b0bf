"""Training options with which another library's model class can express a model."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterable
from dataclasses import fields
from shlex import quote
from typing import Any

from linattn import mixers
from linattn.hf.convert import Family
from linattn.hf.convert.table import repeated
from linattn.models import LMConfig, pattern

_PATTERNS = {  # of families whose default config is irregular or is not read
    "kimi_linear": {"mixer": "kda*3, mla", "ffn": "swiglu, experts*3"},
    "rwkv6": {"mixer": "rwkv6, rwkv_channel", "ffn": "none"},
}
_PARTS = ("norm_eps",)  # options that are None without the part that they describe
_SIZES = {"vocab_size", "dim", "layers", "ffn_dim", "mixer", "mixer_options", "ffn_options", "layer_options"}


def layers_for(target: Family) -> str:
    """Command-line arguments that train the layers of ``target``."""
    theirs = _PATTERNS.get(target.model_type) or target.fields(target.config_of({"model_type": target.model_type}))
    return " ".join(f'--{name} "{_period(theirs[name])}"' for name in ("mixer", "ffn") if name in theirs)


def remedy(ours: LMConfig, again: LMConfig) -> str:
    """Changes that turn ``ours`` into ``again``, the nearest model that the other library has; empty if no option makes them."""
    options = [f"--mixer-option {quote(f'{name}.{option}={json.dumps(value)}')}" for (name, option), value in _options(ours, again).items()]
    changed = {
        f.name: getattr(again, f.name)
        for f in fields(LMConfig)
        if f.name not in _SIZES and getattr(again, f.name) != getattr(ours, f.name) and not _same_pattern(f.name, ours, again)
    }
    if "ffn" in changed:
        options.append(f'--ffn "{changed.pop("ffn")}"')
    if "norm" in changed:
        options.append(f"--norm {changed.pop('norm')}")
    python = [f"{name}={value!r}" for name, value in changed.items()]
    return " ".join([*options, *([f"LMConfig({', '.join(python)}) in Python"] if python else [])])


def distinct(differences: Iterable[str], most: int = 4) -> str:
    """First differences, those that all layers share once, and the number of further ones."""
    by_part: dict[str, str] = {}
    for line in differences:
        by_part.setdefault(re.sub(r"layers\.\d+\.", "", line), line)
    found = list(by_part.values())
    return ", ".join(found[:most]) + (f" and {len(found) - most} more" if len(found) > most else "")


def _options(ours: LMConfig, again: LMConfig) -> dict[tuple[str, str], Any]:
    """Options of mixers, by mixer and option, whose value in ``again`` is the same in all layers and differs from ours.

    Options that are None here follow from the width, as in the published class, except those of :data:`_PARTS`.
    """
    wanted: dict[tuple[str, str], list[Any]] = {}
    if ours.mixer_names != again.mixer_names:
        return {}
    for layer, name in enumerate(ours.mixer_names):
        defaults = {p.name: p.default for p in inspect.signature(mixers.info(name).cls).parameters.values() if p.default is not p.empty}
        was, would_be = defaults | ours.options_of(layer), defaults | again.options_of(layer)
        for option in would_be:
            if was.get(option) != would_be[option] and (was.get(option) is not None or option in _PARTS):
                wanted.setdefault((name, option), []).append(would_be[option])
    return {place: values[0] for place, values in wanted.items() if all(value == values[0] for value in values)}


def _same_pattern(name: str, ours: LMConfig, again: LMConfig) -> bool:
    return name == "ffn" and ours.ffn_names == again.ffn_names


def _period(text: str) -> str:
    """Shortest pattern that repeats to ``text``."""
    names = pattern.parse(text, "pattern")
    periods = (names[:n] for n in range(1, len(names) + 1))
    return repeated(next(part for part in periods if all(name == part[i % len(part)] for i, name in enumerate(names))))
