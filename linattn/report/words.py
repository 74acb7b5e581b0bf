"""Formatting of figures for readers."""

from __future__ import annotations


def figure(value: float, digits: int = 3) -> str:
    """``digits`` significant digits, no exponent: 0.00123, 1.23, 12.3, 1,230."""
    if value == 0:
        return "0"
    rounded = float(f"{value:.{digits - 1}e}")
    exponent = int(f"{rounded:e}".partition("e")[2])
    return f"{rounded:,.{max(0, digits - 1 - exponent)}f}"


def tick(value: float) -> str:
    """A round value without trailing zeros: 0.05, 2, 500, 20k, 5M."""
    for limit, unit in ((1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            return f"{value / limit * (10 if unit == 'k' else 1):g}{unit}"
    return f"{value:g}".replace("-", "\u2212")


def tokens(value: float) -> str:
    """A number of tokens: 256, 1k, 16k (k = 1024)."""
    return f"{value / 1024:g}k" if value >= 1024 and value % 1024 == 0 else f"{value:,.0f}"


def memory(value: float) -> str:
    """Bytes in binary units with three digits: 512 B, 96.0 KiB, 1.50 MiB."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.0f} B" if unit == "B" else f"{figure(value)} {unit}"


def memory_tick(value: float) -> str:
    """A power of two of bytes in shortest form: 512 B, 64 KiB, 4 MiB."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:g} {unit}"


def times(ratio: float) -> str:
    """A ratio: 1.4 times, 64 times."""
    return f"{ratio:,.0f} times" if ratio >= 10 else f"{ratio:.1f} times"


def percent(share: float) -> str:
    """A share of 1: 97.24 %."""
    return f"{100 * share:.2f} %"
