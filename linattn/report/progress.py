"""Progress of a comparison on stderr: bars on a terminal, a line for each part elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from linattn.report.words import tokens

if TYPE_CHECKING:
    from rich.progress import Progress as Bars


class Progress:
    """Progress on stderr, if ``shown``."""

    def __init__(self, shown: bool) -> None:
        self.shown = shown

    @property
    def bars(self) -> bool:
        """True if there is a terminal to draw bars on."""
        return self.shown and sys.stderr.isatty()

    def say(self, line: str) -> None:
        """Print a line."""
        if self.shown:
            print(line, file=sys.stderr, flush=True)

    def measurements(self, turns: Sequence[tuple[int, str]]) -> Iterator[tuple[int, str]]:
        """Iterate over ``turns``, pairs of a context and a mixer, with a bar that names the current pair."""
        if not self.bars:
            self.say(f"measuring {', '.join(dict.fromkeys(name for _, name in turns))}")
            yield from turns
            return
        with _bars() as bars:
            task = bars.add_task("measuring", total=len(turns))
            for context, name in turns:
                bars.update(task, description=f"measuring {name} at {tokens(context)}")
                yield context, name
                bars.advance(task)
            bars.update(task, description="measured")

    @contextmanager
    def counted(self, title: str, total: int, done: int = 0) -> Iterator[Callable[[str], None]]:
        """Context with a function to call after each of ``total`` parts with its description; ``done`` parts are already finished."""
        if not self.bars:
            count = iter(range(done + 1, total + 1))
            yield lambda said: self.say(f"{title}: {next(count, total)} of {total}: {said}")
            return
        with _bars() as bars:
            task = bars.add_task(title, total=total, completed=done)
            yield lambda said: bars.update(task, advance=1, description=f"{title}: {said}")

    @contextmanager
    def amount(self, title: str, total: int) -> Iterator[Callable[[int], None]]:
        """Context with a function to call with the amount of ``total`` done; shown on a terminal."""
        with _bars() as bars:
            task = bars.add_task(title, total=total)
            yield lambda done: bars.update(task, completed=done)


def _bars() -> Bars:
    """Progress bar with figures, followed by text that narrow terminals cut off."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(bar_width=10), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    return Progress(*columns, console=Console(stderr=True, highlight=False))
