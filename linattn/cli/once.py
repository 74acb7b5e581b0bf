"""Messages to standard error that several processes have, printed by one of them."""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path


def say(line: str) -> None:
    """Print ``line``, unless a process that torchrun has started on this machine beside this one has printed it already.

    The first one prints, of any rank: torchrun ends the others as soon as one has failed.
    """
    if not _said(line):
        print(line, file=sys.stderr)


def _said(line: str) -> bool:
    """True if another process has left the mark of ``line``; else this one leaves it, in torchrun's folder for these processes."""
    own = os.environ.get("TORCHELASTIC_ERROR_FILE")  # FOLDER/RANK/error.json
    if not own:
        return False
    try:
        (Path(own).parents[1] / f"said-{hashlib.sha256(line.encode()).hexdigest()[:16]}").touch(exist_ok=False)
    except FileExistsError:
        return True
    except (OSError, IndexError):
        return False
    return False
