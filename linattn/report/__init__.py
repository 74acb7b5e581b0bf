"""Reports: the comparison of several mixers as JSON and as a page, and parts of pages and plots."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from linattn.compare.options import QUICK as QUICK
    from linattn.compare.options import CompareOptions as CompareOptions


def __getattr__(name: str) -> Any:
    """Import the options of a comparison on demand, because they belong to a higher layer."""
    if name not in ("CompareOptions", "QUICK"):
        raise AttributeError(f"module 'linattn.report' has no attribute {name!r}")
    return getattr(import_module("linattn.compare.options"), name)


def compare(options: CompareOptions | None = None, *, progress: bool = False) -> dict:
    """Train one model per mixer at one size, measure all, write ``report.json`` and ``report.html`` into ``options.out``.

    Args:
        options: what to compare; the defaults take some minutes on two cores.
        progress: show progress on stderr.

    Returns:
        The content of ``report.json``.

    Raises:
        ValueError: a mixer, text or size that cannot be compared, or a folder that holds something else.
    """
    from linattn.compare.options import CompareOptions
    from linattn.compare.text import run

    return run(options or CompareOptions(), progress=progress)
