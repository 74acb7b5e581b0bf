"""Scales of a plot: positions of values between two ends, and ticks at round values."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Scale:
    """Map of values to positions in [0, 1]; ``low`` < ``high``, and ``ticks`` ascend within them."""

    low: float
    high: float
    ticks: tuple[float, ...]
    log: bool = False

    def __call__(self, value: float) -> float:
        """Position of ``value``, 0 at the low end and 1 at the high end; values outside are clamped."""
        low, high, value = (math.log(v) if self.log else v for v in (self.low, self.high, max(value, self.low)))
        return min((value - low) / (high - low), 1.0)


def linear(values: Iterable[float], *, zero: bool = False, count: int = 5) -> Scale:
    """A linear scale over ``values`` with about ``count`` ticks at 1, 2 or 5 times a power of ten; from 0 if ``zero``."""
    values = list(values)
    low, high = (0.0 if zero else min(values)), max(values)
    if high <= low:
        low, high = (low, low + 1.0) if zero else (low - 0.5, low + 0.5)
    step = _round_step((high - low) / count)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = tuple(round(i * step, 12) for i in range(first, last + 1))
    return Scale(ticks[0], ticks[-1], ticks)


def logarithmic(values: Iterable[float], *, base: int = 10, count: int = 7) -> Scale:
    """A logarithmic scale over positive ``values``.

    Its ends are powers of ``base``, with base 10 also 2 and 5 times one. With more than ``count`` ticks
    only powers are used, or every second, third, ... of them.
    """
    values = list(values)
    if min(values) <= 0:
        raise ValueError(f"a logarithmic scale needs values above 0, but came with {min(values)}")
    steps = _steps(min(values), max(values), base)
    low, high = steps[0][1], steps[-1][1]
    if len(steps) > count:
        steps = [s for s in steps if s[0] == 1]
    return Scale(low, high, tuple(tick for _, tick in steps[:: math.ceil(len(steps) / count)]), log=True)


def _steps(low: float, high: float, base: int) -> list[tuple[int, float]]:
    """Pairs of mantissa and tick, from the last one not above ``low`` to the first not below ``high``, two at least."""
    first, last = math.floor(math.log(low, base)) - 1, math.ceil(math.log(high, base)) + 1
    mantissas = (1, 2, 5) if base == 10 else (1,)
    steps = [(m, float(m) * float(base) ** power) for power in range(first, last + 1) for m in mantissas]
    begin = max(i for i, (_, tick) in enumerate(steps) if tick <= low * (1 + 1e-9))
    end = min(i for i, (_, tick) in enumerate(steps) if tick >= high * (1 - 1e-9))
    return steps[begin : max(end, begin + 1) + 1]


def _round_step(step: float) -> float:
    power = 10.0 ** math.floor(math.log10(step))
    return next(m * power for m in (1, 2, 5, 10) if m * power >= step * (1 - 1e-9))
