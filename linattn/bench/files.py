"""Where figures are kept."""

from __future__ import annotations

import re
from pathlib import Path


def file_for(out: Path, kind: str, card: str) -> Path:
    """``out``, or in it, if it is a folder, a file with the name of the card: ``ops-h200.json``."""
    if not out.is_dir():
        return out
    short = re.sub(r"[^a-z0-9]+", "-", card.lower().removeprefix("nvidia ")).strip("-")
    return out / f"{kind}-{short}.json"
