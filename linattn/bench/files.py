"""Files of measured figures."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from linattn.state import writable


def command(program: str, arguments: Sequence[str], without: Sequence[str] = ("--out",)) -> str:
    """Command line that repeats the measurement, for a file of figures, without the output path or other options with a value."""
    kept, rest = [program], iter(arguments)
    for argument in rest:
        if argument in without:
            next(rest, None)
        elif argument.split("=")[0] not in without:
            kept.append(shlex.quote(argument))
    return " ".join(kept)


def file_for(out: Path, kind: str, card: str) -> Path:
    """Path of the figures: ``out``, or in the folder ``out`` a file with the name of the card: ``ops-h200.json``.

    Raises:
        OSError: if it cannot be written, checked before anything is measured.
    """
    if not out.is_dir():
        return writable(out)
    short = re.sub(r"[^a-z0-9]+", "-", card.lower().removeprefix("nvidia ")).strip("-")
    return writable(out / f"{kind}-{short}.json")
