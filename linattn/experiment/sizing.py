"""Feed-forward widths at which models with different mixers have equal numbers of parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

TOLERANCE = 0.02  # between the largest and the smallest model


class Unequal(ValueError):
    """Error for models that cannot have equal numbers of parameters."""


@dataclass(frozen=True)
class Size:
    """A model's feed-forward width and its parameters."""

    ffn_dim: int
    parameters: int


def equal_sizes(mixers: Sequence[str], target: int, count: Callable[[str, int], int]) -> dict[str, Size]:
    """Choose the integer width for each mixer with the number of parameters closest to ``target``.

    Args:
        mixers: names of the mixers.
        target: number of parameters to approximate.
        count: parameters of the model with this mixer and this feed-forward width; linear in the width.

    Raises:
        Unequal: if the largest and the smallest differ by more than 2 %, stating the numbers.
    """
    sizes = {name: _nearest(target, partial(count, name)) for name in mixers}
    least, most = (f(s.parameters for s in sizes.values()) for f in (min, max))
    if most - least > TOLERANCE * least:
        figures = ", ".join(f"{name} {s.parameters:,} (feed-forward width {s.ffn_dim:,})" for name, s in sizes.items())
        raise Unequal(
            f"the parameter counts of these mixers cannot be matched within {TOLERANCE:.0%} at this width: {figures}; "
            "compare fewer mixers, or begin the list with the largest"
        )
    return sizes


def parameters(build: Callable[[], nn.Module]) -> int:
    """Count the parameters of a model on the meta device."""
    with torch.device("meta"):
        return sum(p.numel() for p in build().parameters())


def _nearest(target: int, count: Callable[[int], int]) -> Size:
    one, two = count(1), count(2)
    width = max(1, 1 + round((target - one) / (two - one)))
    return Size(width, one + (width - 1) * (two - one))
