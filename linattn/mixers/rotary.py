"""Frequencies of rotary positions, and their scalings for texts longer than those a model was first trained on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from linattn.mixers.parts import to_float32

# The numbers that each scaling needs, under the names that published configs give them.
SCALINGS = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "beta_fast", "beta_slow", "attention_factor", "original_max_position_embeddings"),
}


def check_scaling(scaling: Mapping[str, Any]) -> None:
    """Raise ValueError unless ``scaling`` has a known ``rope_type`` and exactly its numbers, each positive."""
    kind = scaling.get("rope_type")
    if not isinstance(kind, str) or kind not in SCALINGS:
        raise ValueError(f"scaling must have a rope_type among {', '.join(map(repr, SCALINGS))}, but it came as {kind!r}")
    if scaling.keys() != {"rope_type", *SCALINGS[kind]}:
        raise ValueError(f"scaling {kind!r} must have {', '.join(SCALINGS[kind])}, but came with {', '.join(sorted(scaling))}")
    for name in SCALINGS[kind]:
        value = scaling[name]
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
            raise ValueError(f"scaling: {name} must be a positive number, but came as {value!r}")
    if kind == "llama3" and not scaling["low_freq_factor"] < scaling["high_freq_factor"]:
        raise ValueError(f"scaling: high_freq_factor must exceed low_freq_factor, but they came as {dict(scaling)}")


def frequencies(x: Tensor, rotated: int, base: float, scaling: Mapping[str, Any] | None = None) -> Tensor:
    """Angle per position of each pair of ``rotated`` channels, [rotated / 2], on the device of ``x`` in float32 or float64.

    Without ``scaling`` pair i has base^(-2 i / rotated) (RoFormer, arXiv 2104.09864). ``linear`` divides all by ``factor``; ``llama3``
    and ``yarn`` (arXiv 2309.00071, section 3.2) divide low frequencies, with few rotations within the original length, keep high ones,
    and interpolate in between.
    """
    channel = torch.arange(0, rotated, 2, dtype=to_float32(x.new_empty(0)).dtype, device=x.device)
    plain = float(base) ** (-channel / rotated)  # torch takes integers up to 64 bits
    if scaling is None:
        return plain
    kept = 0.0 if scaling["rope_type"] == "linear" else _kept(channel, plain, base, scaling)
    return plain * (kept + (1 - kept) / scaling["factor"])


def gain(scaling: Mapping[str, Any] | None) -> float:
    """Factor of rotated queries and keys: YaRN's ``attention_factor``."""
    return 1.0 if scaling is None else scaling.get("attention_factor", 1.0)


def _kept(channel: Tensor, plain: Tensor, base: float, scaling: Mapping[str, Any]) -> Tensor:
    """Share from 0 to 1 of each unscaled frequency in the interpolation."""
    length = scaling["original_max_position_embeddings"]
    if scaling["rope_type"] == "llama3":
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        turns = plain * (length / (2 * math.pi))  # rotations within the original length
        return ((turns - low) / (high - low)).clamp(0, 1)
    rotated = 2 * len(channel)
    first, last = (rotated * math.log(length / (2 * math.pi * scaling[name])) / (2 * math.log(base)) for name in ("beta_fast", "beta_slow"))
    start, end = max(math.floor(first), 0), min(math.ceil(last), rotated - 1)
    return 1 - ((channel / 2 - start) / max(end - start, 1e-3)).clamp(0, 1)
