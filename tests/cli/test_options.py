"""Command options generated from the fields of a dataclass."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from linattn.arguments import check_fields, option
from linattn.cli.options import options_of, takes
from linattn.compare.tasks import TaskOptions
from linattn.report import CompareOptions
from linattn.reproduce import ReproduceOptions
from linattn.train import TrainOptions


@dataclass(frozen=True)
class Options:
    names: tuple[str, ...] = option(("a", "b"), "Names.", "A,B,...", separated=True)
    counts: tuple[int, ...] = option((1,), "Counts.", "N,N,...", separated=True)
    text: tuple[str | Path, ...] = option((), "Files.", "FILE", shown="none of yours")
    batch_size: int = option(7, "Rows.", "N", least=1)
    rate: float | None = option(None, "Speed.", "R", shown="as fast as it goes")
    out: Path | None = option(None, "Folder.", "DIR")
    resume: bool = option(False, "Go on.")
    keep_all: bool = option(False, "Keep everything.")
    inner: int = option(3, least=2)
    hidden: list[int] = field(default_factory=list)


def run(*words: str, **how: Any) -> dict[str, Any] | str:
    """Values of a command's options for ``words``; its error, or its help."""
    got: dict[str, Any] = {}

    @takes(*options_of(Options, **how))
    def command(given: dict[str, Any], task: Annotated[str, typer.Option(help="Which.")] = "text") -> None:
        """Do it."""
        got.update(given, task=task)

    app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command()(command)
    result = CliRunner().invoke(app, words, terminal_width=200)
    if isinstance(result.exception, Exception):
        raise result.exception
    return got or result.output


def test_what_did_not_come_is_not_given():
    assert run() == {"task": "text"}


@pytest.mark.parametrize(
    ("words", "given"),
    [
        (["--names", " x, y,"], {"names": ("x", "y")}),
        (["--names", ""], {"names": ()}),
        (["--counts", "3,4"], {"counts": (3, 4)}),
        (["--text", "a", "--text", "b,c"], {"text": ("a", "b,c")}),
        (["--batch-size", "0"], {"batch_size": 0}),
        (["--rate", "0.5"], {"rate": 0.5}),
        (["--out", "x"], {"out": Path("x")}),
        (["--resume"], {"resume": True}),
        (["--task", "sort", "--batch-size", "2"], {"batch_size": 2, "task": "sort"}),
    ],
)
def test_values_have_the_types_of_their_fields(words, given):
    assert run(*words) == {"task": "text", **given}


def test_flags_are_spelled_with_hyphens():
    assert run("--keep-all")["keep_all"] is True


def test_lists_of_numbers_are_named_where_they_are_none():
    with pytest.raises(ValueError, match="--counts must be whole numbers separated by commas, but came as '1,x'"):
        run("--counts", "1,x")


def test_the_help_says_the_defaults():
    text = " ".join(run("--help").split())
    assert "--text FILE Files. [default: none of yours]" in text and "--batch-size N Rows. [default: 7]" in text
    assert "--out DIR Folder. --resume Go on." in text and "--inner" not in text and "--no-resume" not in text
    assert text.index("--task") < text.index("--names") < text.index("--resume")
    assert "Rows. [default: seven]" in " ".join(run("--help", show=lambda one: "seven").split())


@pytest.mark.parametrize(
    ("wrong", "says"), [({"batch_size": 0}, "batch_size must be at least 1"), ({"inner": 1}, "inner must be at least 2")]
)
def test_bounds_are_those_of_the_field(wrong, says):
    check_fields(Options())
    with pytest.raises(ValueError, match=f"{says}, but came as"):
        check_fields(Options(**wrong))


@pytest.mark.parametrize("cls", [CompareOptions, TaskOptions, TrainOptions, ReproduceOptions])
def test_every_option_of_ours_can_be_derived(cls):
    asked = [one.name for one in fields(cls) if "option" in one.metadata and one.metadata["option"].text]
    assert [one.parameter.name for one in options_of(cls)] == asked != []
