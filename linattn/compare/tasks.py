"""Tasks of ``linattn compare`` other than text: a task is data, a model of any mixer, a loss, and the reported figures.

A new task is a module with a ``TASK`` and a line in :data:`TASKS`.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from linattn.arguments import check_distinct, check_fields, command_line, option

if TYPE_CHECKING:  # not imported for the command line, which reads the names of tasks here
    from torch import Tensor, nn

    from linattn.experiment.study import Column

TASKS = {  # module, and the name in it if not TASK
    "digits": "linattn.compare.digits",
    "recommend": "linattn.compare.recommend",
    "reverse": "linattn.compare.sequences",
    "sort": "linattn.compare.sequences:SORT",
    "translate": "linattn.compare.translate",
}
ALL = ("all",)  # in place of names: every mixer that fits the task


class Savable(Protocol):
    """Protocol of models that can be saved to a folder."""

    def save(self, folder: Path, /) -> None: ...


@dataclass(frozen=True)
class Recipe:
    """Recipe for the models of a task: AdamW, a warm-up over a twentieth of the steps, then a cosine to 0.

    Args:
        mixers: the default mixers.
        steps: optimizer steps.
        dim, layers: size of the models.
        batch_size: examples of a step.
        learning_rate: its peak.
        weight_decay: of matrices.
        seeds: models of each mixer, over which means are reported.
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
        question: the task and its metrics, in a sentence or two.
        full, quick: recipes, the second for ``--quick``.
        figures: columns for the values of ``evaluate`` and ``measure``; the curves show the first.
    """

    title: str
    question: str
    full: Recipe
    quick: Recipe
    figures: tuple[Column, ...]

    def facts(self) -> dict[str, Any]:
        """Description of the data: ``name``, ``sha256`` and further JSON values.

        ``notes`` is a list of sentences for the user; ``references`` has figures of baselines that are not models, by name.
        """

    def mixers(self) -> list[str]:
        """Names of all mixers that fit the task."""

    def model(self, mixer: str, recipe: Recipe, ffn_dim: int | None) -> nn.Module:
        """A new model with the method ``save`` of :class:`Savable`; ``ffn_dim`` None is the default width. Refuses an unfit mixer."""

    def batches(self, recipe: Recipe, seed: int) -> Iterator[Any]:
        """Endless batches, deterministic in ``seed``."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """The loss of a batch."""

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Figures of a model in ``eval`` mode on test data."""

    def measure(self, model: nn.Module) -> dict[str, float]:
        """Further figures of a trained model, such as times and bytes."""


@runtime_checkable
class OnFile(Protocol):
    """A task that can also use the data in a file."""

    def on(self, path: Path, /) -> Task:
        """The same task on the data in the file ``path``."""


def load(name: str) -> Task:
    """Load the task ``name``.

    Raises:
        ValueError: for an unknown name, with the known ones.
    """
    if name not in TASKS:
        raise ValueError(f"task must be one of text, {', '.join(TASKS)}, but came as {name!r}")
    module, _, own = TASKS[name].partition(":")
    return getattr(import_module(module), own or "TASK")


def on_data(name: str, task: Task, data: Path | None) -> Task:
    """Return ``task``, called ``name``, with the data in the file ``data``; None: with its own data.

    Raises:
        ValueError: for a task that has only its own data.
    """
    if data is None:
        return task
    if not isinstance(task, OnFile):
        raise ValueError(f"--data cannot be used with --task {name}, which has its own")
    return task.on(data)


@dataclass(frozen=True)
class TaskOptions:
    """Options of a comparison on a task; None is the task's default.

    Args:
        task: one of :data:`TASKS`.
        mixers: names, each once, or :data:`ALL`, the largest first. The first has the default feed-forward; the others' widths
            give equal parameters.
        steps, dim, layers, seeds: as in :class:`Recipe`.
        seed: the first seed; the others follow it.
        out: folder of report.json, report.html and models/.
        quick: use the task's quick recipe, a smoke test.
        data: file with the data, for tasks that support one; None: the task's own.
    """

    task: str
    mixers: tuple[str, ...] | None = option(None, separated=True)
    steps: int | None = option(None, least=1)
    dim: int | None = option(None, least=1)
    layers: int | None = option(None, least=1)
    seeds: int | None = option(None, least=1)
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
        """Command line with these options."""
        asked = ("quick", "mixers", "steps", "dim", "layers", "seeds", "seed", "data")
        words = command_line(self, asked, TaskOptions(self.task))
        return shlex.join(["linattn", "compare", "--task", self.task, *words, "--out", str(self.out)])
