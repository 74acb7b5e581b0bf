"""Where figures are kept."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from linattn.state import writable


def command(program: str, arguments: Sequence[str]) -> str:
    """The command line that measures the same, for a file of figures: where somebody wanted them is not part of it."""
    kept, rest = [program], iter(arguments)
    for argument in rest:
        if argument == "--out":
            next(rest, None)
        elif not argument.startswith("--out="):
            kept.append(shlex.quote(argument))
    return " ".join(kept)


def file_for(out: Path, kind: str, card: str) -> Path:
    """``out``, or in it, if it is a folder, a file with the name of the card: ``ops-h200.json``.

    Raises:
        OSError: where it could not be written, which had better be known before anything is measured.
    """
    if not out.is_dir():
        return writable(out)
    short = re.sub(r"[^a-z0-9]+", "-", card.lower().removeprefix("nvidia ")).strip("-")
    return writable(out / f"{kind}-{short}.json")
