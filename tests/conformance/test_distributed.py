"""DDP and FSDP2 on two gloo processes train every mixer to the weights of one process. One pair of processes serves them all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import linattn.mixers
from linattn.mixers import Mixer
from tests.conformance.broken import LeaksRows, Sound, UnusedParameter
from tests.conformance.checks import WRAPPERS

ROOT = Path(__file__).parents[2]


def run(folder: Path, *classes: type[Mixer]) -> dict[type[Mixer], dict[str, str | None]]:
    """Start both processes on ``classes``; what was wrong with each under each wrapper."""
    rendezvous, answer = folder / "rendezvous", folder / "answer.json"
    entries = {f"{cls.__module__}:{cls.__qualname__}": cls for cls in classes}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.conformance.distributed", str(rank), str(rendezvous), str(answer), *entries],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        said = [p.communicate(timeout=300)[0] for p in processes]
    finally:
        for p in processes:
            p.kill()
            p.wait()
    assert answer.is_file(), "\n".join(said)
    return {entries[entry]: found for entry, found in json.loads(answer.read_text(encoding="utf-8")).items()}


def test_ddp_and_fsdp2_equal_one_process(tmp_path: Path) -> None:
    infos = list(map(linattn.mixers.info, linattn.mixers.available()))
    answers = run(tmp_path, Sound, LeaksRows, UnusedParameter, *(i.cls for i in infos))
    assert answers.pop(Sound) == dict.fromkeys(WRAPPERS), "the sound one passes"
    for broken in (LeaksRows, UnusedParameter):
        assert all(answers.pop(broken).values()), f"{broken.__name__} is caught"
    problems = []
    for info in infos:
        for wrapper in WRAPPERS:
            said, reason = answers[info.cls][wrapper], info.exemptions.get(wrapper)
            if said is not None and reason is None:
                problems.append(f"{info.name} under {wrapper}: {said}")
            if said is None and reason is not None:
                problems.append(f"{info.name} under {wrapper}: passes; its exemption ({reason}) is stale")
    assert not problems, "\n".join(problems)
