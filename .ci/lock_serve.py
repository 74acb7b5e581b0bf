"""Write .ci/vllm.lock: everything that the environment of ``make serve`` has besides torch, with the hash of each file for this platform.

.venv-serve/bin/python .ci/lock_serve.py
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

LOCK = Path(__file__).with_name("vllm.lock")
LEFT_OUT = re.compile(r"(torch|torchvision|torchaudio|torchcodec|linattn|pip)([ =@]|$)|-e |#", re.I)
HEADER = """\
# What `make serve` and `make test-serve` install beside torch: vLLM's build for CPUs, for CPython 3.11 on Linux x86-64,
# without torchvision, torchaudio and torchcodec, which nothing here needs. Written by `make lock-serve`.
"""


def main() -> None:
    """Ask pip which file it would install for each pin, and write the hashes of those."""
    pip = [sys.executable, "-m", "pip"]
    pins = [line for line in subprocess.check_output([*pip, "freeze"], text=True).splitlines() if not LEFT_OUT.match(line)]
    with tempfile.TemporaryDirectory() as folder:
        source, report = Path(folder, "pins.txt"), Path(folder, "report.json")
        source.write_text("\n".join(pins) + "\n")
        subprocess.run(
            [*pip, "install", "--quiet", "--dry-run", "--ignore-installed", "--no-deps", "--report", report, "-r", source], check=True
        )
        found = json.loads(report.read_text())["install"]
    lines = [f"{one['metadata']['name']}=={one['metadata']['version']} \\\n    --hash=sha256:{_hash(one)}" for one in found]
    LOCK.write_text(HEADER + "\n".join(sorted(lines, key=lambda line: line.lower().replace("_", "-"))) + "\n")


def _hash(one: dict) -> str:
    return one["download_info"]["archive_info"]["hashes"]["sha256"]


if __name__ == "__main__":
    main()
