"""The files of the project, as git would track them."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SKIPPED = {".git", ".venv", "site", "runs", "build", "built", "dist", "__pycache__"}


def files() -> list[Path]:
    """Tracked and untracked files; in a copy without git, all that are not build products."""
    listing = subprocess.run(["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listing.returncode == 0:
        names = [ROOT / name for name in listing.stdout.split("\0") if name]
    else:
        names = [p for p in ROOT.rglob("*") if not any(part in SKIPPED or part.startswith(".") for part in p.relative_to(ROOT).parts[:-1])]
    return sorted(p for p in names if p.is_file())
