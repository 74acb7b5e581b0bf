import io
import re
import sys

import pytest

from linattn.cli.main import main


class Terminal(io.StringIO):
    """A stdout that reports to be a terminal."""

    encoding = "utf-8"

    def isatty(self):
        return True


@pytest.fixture
def run_on_terminal(monkeypatch):
    """Run the command line with a stdout that is a terminal of 70 columns; returns the exit code and the text without styles."""

    def run(*args):
        stream = Terminal()
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", stream)
            for name, value in {"COLUMNS": "70", "TERM": "xterm", "NO_COLOR": "1"}.items():
                patch.setenv(name, value)
            code = main(args)
        return code, re.sub(r"\x1b\[\d*m", "", stream.getvalue())

    return run
