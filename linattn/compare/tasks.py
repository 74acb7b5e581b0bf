"""The tasks of ``linattn compare`` beside text: a task is data, a model of any mixer, a loss, and what is reported of the result.

One that joins is a module with a ``TASK`` and a line in :data:`TASKS`; :mod:`linattn.compare.task`
knows none by name.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from linattn.arguments import check_distinct, check_fields, command_line, option

if TYPE_CHECKING:  # the command line reads the names of the tasks from here
    from torch import Tensor, nn

    from linattn.experiment.study import Column

TASKS = {  # module, and what it is called there if not TASK
    "digits": "linattn.compare.digits",
    "recommend": "linattn.compare.recommend",
    "reverse": "linattn.compare.sequences",
    "sort": "linattn.compare.sequences:SORT",
    "translate": "linattn.compare.translate",
}
ALL = ("all",)  # in place of names: every mixer that can do a task


class Savable(Protocol):
    """A model that is written into a folder of its own."""

    def save(self, folder: Path, /) -> None: ...


@dataclass(frozen=True)
class Recipe:
    """Recipe for the models of a task: AdamW, a warm-up over a twentieth of the steps, then a cosine to 0.

    Args:
        mixers: those that are compared if nobody names others.
        steps: optimizer steps.
        dim, layers: size of the models.
        batch_size: examples of a step.
        learning_rate: its peak.
        weight_decay: of matrices.
        seeds: how many models of each mixer are trained; means over them are told.
    """

    mixers: tuple[str, ...]
    steps: int
    dim: int
    layers: int
    batch_size: int
    learning_rate: float
    weight_decay: float = 0.05
    seeds: int = 3


class Task(Protocol):
    """The protocol of a task.

    Attributes:
        title: of the report's page.
        question: a sentence or two: what is learned, and how it is judged.
        full, quick: recipes, the second for ``--quick``.
        figures: of what ``evaluate`` and ``measure`` return, the first being the one that curves are drawn of.
    """

    title: str
    question: str
    full: Recipe
    quick: Recipe
    figures: tuple[Column, ...]

    def facts(self) -> dict[str, Any]:
        """The data: ``name``, ``sha256`` and whatever else there is to say of them, JSON values.

        ``notes``, a list of sentences, is for whoever asked for the comparison; ``references`` has, by name, figures of what is no model:
        the best that is possible, or a rule of thumb.
        """

    def mixers(self) -> list[str]:
        """Names of all mixers that can do it."""

    def model(self, mixer: str, recipe: Recipe, ffn_dim: int | None) -> nn.Module:
        """A new model, which has :class:`Savable`'s ``save``; None leaves the feed-forward its usual width. Refuses an unfit mixer."""

    def batches(self, recipe: Recipe, seed: int) -> Iterator[Any]:
        """Batches without end, the same for the same seed."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """The loss of a batch."""

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Figures of a model, in ``eval``, on what it has not learned from."""

    def measure(self, model: nn.Module) -> dict[str, float]:
        """Further figures of a model that has learned all it will: times, bytes."""


@runtime_checkable
class OnFile(Protocol):
    """A task that can also be done with somebody's own data."""

    def on(self, path: Path, /) -> Task:
        """The same on the data in the file ``path``."""


def load(name: str) -> Task:
    """The task ``name``.

    Raises:
        ValueError: with the names that there are.
    """
    if name not in TASKS:
        raise ValueError(f"task must be one of text, {', '.join(TASKS)}, but came as {name!r}")
    module, _, own = TASKS[name].partition(":")
    return getattr(import_module(module), own or "TASK")


def on_data(name: str, task: Task, data: Path | None) -> Task:
    """``task``, called ``name``, on the file ``data``; on its own data if that is None.

    Raises:
        ValueError: for a task that has its own data only.
    """
    if data is None:
        return task
    if not isinstance(task, OnFile):
        raise ValueError(f"--data cannot be used with --task {name}, which has its own")
    return task.on(data)


@dataclass(frozen=True)
class TaskOptions:
    """Options of a comparison on a task; for None the task chooses.

    Args:
        task: one of :data:`TASKS`.
        mixers: names, each once, or :data:`ALL`, the largest first. The first has the usual feed-forward; the width of the others'
            makes the parameters equal.
        steps, dim, layers, seeds: as in :class:`Recipe`.
        seed: the first seed; the others follow it.
        out: folder of report.json, report.html and models/.
        quick: the task's recipe to see whether everything works.
        data: a file to learn from, for tasks that can; None: the task's own.
    """

    task: str
    mixers: tuple[str, ...] | None = option(None, separated=True)
    steps: int | None = option(None, least=1)
    dim: int | None = option(None, least=1)
    layers: int | None = option(None, least=1)
    seeds: int | None = option(
        None, "Models of each mixer, with the seeds S, S + 1, ...; text has one.", "N", shown="the task's own, 3", least=1
    )
    seed: int = 0
    out: Path = Path("runs/compare")
    quick: bool = False
    data: Path | None = option(
        None,
        "A file that the task learns from: recommend takes a CSV with the columns user,item,time, translate lines of a source, a tab "
        "and its target.",
        "FILE",
        shown="the task's own data",
    )

    def __post_init__(self) -> None:
        check_fields(self)
        if self.mixers is not None:
            check_distinct("mixers", self.mixers)
        if not 0 <= self.seed < 2**32 - 1000:
            raise ValueError(f"seed must be from 0 to 2**32 - 1001, but came as {self.seed}")

    def command(self) -> str:
        """The command line that asks for the same."""
        asked = ("quick", "mixers", "steps", "dim", "layers", "seeds", "seed", "data")
        words = command_line(self, asked, TaskOptions(self.task))
        return shlex.join(["linattn", "compare", "--task", self.task, *words, "--out", str(self.out)])
