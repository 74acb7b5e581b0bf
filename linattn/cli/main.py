"""Entry point of the command line: ``linattn`` and ``python -m linattn``.

Each command is one file here with one function of its name. The function itself imports all but typer, so that help is printed at
once, without torch. Errors are caught here: one line on stderr and exit code 2.
"""

from __future__ import annotations

import _thread
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Annotated

import typer
from typer.main import get_command

import linattn
from linattn.arguments import beyond_memory
from linattn.cli.once import say
from linattn.extras import missing
from linattn.train.options import Terminated

COMMANDS = (
    "compare", "data", "train", "plan", "convert", "quantize", "evaluate", "generate", "chat", "walkthrough", "export", "list", "show",
    "atlas", "draw", "bench", "reproduce",
)  # fmt: skip
EARLIER = {"trace": "walkthrough"}  # earlier names of commands

app = typer.Typer(
    name="linattn",
    help="Linear attention for PyTorch: compare mixers; train, convert, evaluate and run models.",
    epilog="Start with: linattn compare --quick. Each command has its own --help.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # help is the same text on a terminal, in a pipe and in the documentation
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _name in COMMANDS:
    app.command(_name)(getattr(import_module(f"linattn.cli.{_name}"), _name))
for _earlier, _name in EARLIER.items():
    app.command(_earlier, hidden=True)(getattr(import_module(f"linattn.cli.{_name}"), _name))


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context, version: Annotated[bool, typer.Option("--version", help="Show the version and exit.", is_eager=True)] = False
) -> None:
    if version:
        print(f"linattn {linattn.__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line ``args`` (default: the process's) and return its exit code."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # a process may be started without standard streams
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115  (open until the process ends)
    try:
        with _repeating_interrupts():
            code = get_command(app)(args, prog_name="linattn", standalone_mode=False) or 0
        sys.stdout.flush()  # report a closed pipe here, not in the interpreter's shutdown
    except BrokenPipeError:
        sys.stdout = None  # the reader has closed the pipe
        return 1
    except (typer.TyperException, ModuleNotFoundError, OSError, ValueError) as error:
        return _refuse(_message(error), 2)
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, Terminated):
            return _refuse(str(error), 128 + error.signal)
        if not beyond_memory(error):
            raise
        return _refuse("not enough memory" + (f": {error}" if str(error) else ""), 2)
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    return _refuse("interrupted", code) if code == 130 else code


@contextmanager
def _repeating_interrupts() -> Iterator[None]:
    """Repeat an interrupt that Python has dropped, as it drops every exception raised in a weak reference's callback."""
    before = sys.unraisablehook

    def repeat(dropped: sys.UnraisableHookArgs) -> None:
        if issubclass(dropped.exc_type, KeyboardInterrupt):
            threading.Timer(0.01, _thread.interrupt_main).start()  # when the callback is over
        else:
            before(dropped)

    sys.unraisablehook = repeat
    try:
        yield
    finally:
        sys.unraisablehook = before


def _message(error: Exception) -> str:
    """Format ``error`` for the user of a command; a missing module of linattn itself is a bug and raised again."""
    if isinstance(error, typer.TyperException):
        return _usage(error)
    if isinstance(error, ModuleNotFoundError):
        package = (error.name or "").partition(".")[0]
        if package in ("", "linattn"):
            raise error
        return missing(package)
    if isinstance(error, OSError) and error.filename:
        return f"{error.strerror}: {error.filename}"
    if "Overflow when unpacking" in str(error):  # torch's message for an integer beyond 64 bits, with a C++ stack trace
        return "a number is too large: sizes are 64-bit integers"
    if isinstance(error, UnicodeEncodeError):  # Python decodes invalid UTF-8 in arguments to lone surrogates
        return f"a text must be UTF-8, but came as {error.object!r}"
    return str(error)


def _usage(error: typer.TyperException) -> str:
    """Format a wrong use of a command: with the value that came, and where its help is unless a name is suggested."""
    text = error.format_message().replace("Value error, ", "")  # pydantic's prefix
    for one in getattr(error.__cause__, "errors", list)():  # of pydantic
        text += "" if str(one["input"]) in text else f", but came as {one['input']!r}"
    context = getattr(error, "ctx", None)
    suggested = "?" in text or "Possible options" in text
    if context is None or suggested or not text.startswith(("No such", "Missing", "Got unexpected", "Option ")):
        return text
    return f"{text.rstrip('.')}; see {context.command_path} --help"


def _refuse(message: str, code: int) -> int:
    """Print ``message`` on one line of stderr, once for all processes of a launch, and return ``code``."""
    sys.stdout.flush()
    say(f"linattn: {' '.join(message.split())}")
    return code
