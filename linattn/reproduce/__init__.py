"""Studies of papers on the capacity, state tracking and extrapolation of states of fixed size, each reproduced by one command.

Each study is a module here; ``linattn reproduce`` and :func:`run` run it and write a report.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from linattn.reproduce.options import STUDIES as STUDIES
from linattn.reproduce.options import ReproduceOptions as ReproduceOptions


def run(
    study: str,
    *,
    full: bool = False,
    mixers: Sequence[str] | None = None,
    seeds: int | None = None,
    out: str | Path | None = None,
    minutes: float | None = None,
    progress: bool = False,
) -> dict:
    """Run ``study`` and write ``report.json`` and ``report.html`` into ``out``.

    Runs already saved in ``out`` are not repeated, so that an interrupted study continues.

    Args:
        study: one of :data:`STUDIES`.
        full, mixers, seeds, out, minutes: as in :class:`ReproduceOptions`.
        progress: show progress on stderr.

    Returns:
        The content of ``report.json``: "rows" is the table, "runs" all measurements, "complete" whether every run is finished.

    Raises:
        ValueError: for an invalid study, mixer, option or number, a folder with other files, and one to
            which another process is writing.
    """
    from linattn.reproduce.ledger import reproduce

    if mixers is not None and not (isinstance(mixers, Sequence) and not isinstance(mixers, str) and all(type(m) is str for m in mixers)):
        raise ValueError(f"mixers must be a list of names, but came as {mixers!r}")
    chosen = None if mixers is None else tuple(mixers)
    options = ReproduceOptions(study, full, chosen, seeds, None if out is None else Path(out), minutes)
    return reproduce(options, progress=progress)
