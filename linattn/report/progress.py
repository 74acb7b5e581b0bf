"""How far a comparison is, on stderr: bars on a terminal, a line for each part elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from linattn.report.words import tokens


class Progress:
    """Says what happens, if ``shown``."""

    def __init__(self, shown: bool) -> None:
        self.console = Console(stderr=True, quiet=not shown, highlight=False)

    @property
    def bars(self) -> bool:
        """Whether there is a terminal to draw bars on."""
        return self.console.is_terminal and not self.console.quiet

    def say(self, line: str) -> None:
        """A line of its own."""
        self.console.print(line, soft_wrap=True, markup=False)

    def measurements(self, turns: Sequence[tuple[int, str]]) -> Iterator[tuple[int, str]]:
        """Each pair of ``turns``, a context and a mixer, with a bar that names it while it lasts."""
        if not self.bars:
            self.say(f"measuring {', '.join(dict.fromkeys(name for _, name in turns))}")
            yield from turns
            return
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Bars(*columns, console=self.console) as bars:
            task = bars.add_task("measuring", total=len(turns))
            for context, name in turns:
                bars.update(task, description=f"measuring {name} at {tokens(context)}")
                yield context, name
                bars.advance(task)
            bars.update(task, description="measured")
