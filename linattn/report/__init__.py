"""One comparison of several mixers: trained alike, measured alike, written down as JSON and as a page."""

from __future__ import annotations

from linattn.report.options import QUICK as QUICK
from linattn.report.options import CompareOptions as CompareOptions


def compare(options: CompareOptions | None = None, *, progress: bool = False) -> dict:
    """Train one model per mixer at one size, measure all, write ``report.json`` and ``report.html`` into ``options.out``.

    Args:
        options: what to compare; the defaults take some minutes on two cores.
        progress: show on stderr how far it is.

    Returns:
        What ``report.json`` holds.

    Raises:
        ValueError: a mixer, text or size that cannot be compared, or a folder that holds something else.
    """
    from linattn.report.run import run

    return run(options or CompareOptions(), progress=progress)
