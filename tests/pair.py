"""Groups of processes of one program with a common answer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.programs import Programs

ROOT = Path(__file__).parents[1]


def answer_of(module: str, folder: Path, *words: str, timeout: int, ranks: int = 2, programs: Programs | None = None) -> Any:
    """Run ``python -m module RANK RENDEZVOUS_FILE ANSWER_FILE words`` for all ``ranks`` concurrently; returns their JSON.

    With ``programs`` they are forked from its process; otherwise they may read variables on import of torch or triton.
    """
    answer = folder / "answer.json"
    if programs is not None:
        all_words = [("-m", module, rank, folder / "rendezvous", answer, *words) for rank in range(ranks)]
        done = programs.together(all_words, env={**os.environ, "OMP_NUM_THREADS": "1"}, seconds=timeout)
        assert answer.is_file(), "\n".join(d.stdout + d.stderr for d in done)
        return json.loads(answer.read_text(encoding="utf-8"))
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", module, str(rank), str(folder / "rendezvous"), str(answer), *words],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rank in range(ranks)
    ]  # fmt: skip
    try:
        said = [p.communicate(timeout=timeout)[0] for p in processes]
    finally:
        for p in processes:
            p.kill()
            p.wait()
    assert answer.is_file(), "\n".join(said)
    return json.loads(answer.read_text(encoding="utf-8"))
