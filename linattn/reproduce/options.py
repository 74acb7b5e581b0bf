"""Options of a study. The module imports nothing slow, because the command line reads its names."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from linattn.arguments import check_distinct, command_line, option

STUDIES = ("recall", "capacity", "state-tracking", "copying", "extrapolation", "hybrids", "precision")


@dataclass(frozen=True)
class ReproduceOptions:
    """Options of a study.

    Args:
        study: one of :data:`STUDIES`.
        full: the settings of the papers instead of those that take minutes on two cores.
        mixers: variants of registered mixers (see :mod:`linattn.reproduce.variants`); None: the study's own choice.
        seeds: number of seeds; None: the study's own.
        out: folder of report.json and report.html; None: ``runs/reproduce/`` and the study's name.
        minutes: time after which no run starts; the same command continues later. None: no limit.
    """

    study: str
    full: bool = option(False, "The papers' own settings, for a GPU.")
    mixers: tuple[str, ...] | None = option(
        None,
        "Names from `linattn list`, with options as in softmax:window=16, or all.",
        "A,B,...",
        shown="the study's own choice",
        separated=True,
    )
    seeds: int | None = option(None, "Number of seeds.", "N", shown="the study's own, mostly 3")
    out: Path | None = option(
        None, "Folder of the report; runs that it already holds are not repeated.", "DIR", shown="runs/reproduce/STUDY"
    )
    minutes: float | None = option(None, "Start no further run after M minutes; the same command continues the study.", "M")

    def __post_init__(self) -> None:
        if self.study not in STUDIES:
            raise ValueError(f"study must be one of {', '.join(STUDIES)}, but came as {self.study!r}")
        if self.mixers is not None:
            check_distinct("mixers", self.mixers)
        if self.seeds is not None and (type(self.seeds) is not int or self.seeds < 1):
            raise ValueError(f"seeds must be an integer of at least 1, but came as {self.seeds!r}")
        if self.minutes is not None and (type(self.minutes) not in (int, float) or not self.minutes > 0):
            raise ValueError(f"minutes must be a number above 0, but came as {self.minutes!r}")

    @property
    def folder(self) -> Path:
        """Folder of the report."""
        return Path("runs") / "reproduce" / self.study if self.out is None else Path(self.out)

    def command(self) -> str:
        """Command line with these options."""
        words = command_line(self, ("mixers", "seeds", "out", "minutes"))
        return shlex.join(["linattn", "reproduce", self.study, "--full" if self.full else "--quick", *words])
