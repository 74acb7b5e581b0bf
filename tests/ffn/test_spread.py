"""Experts spread over two gloo processes equal one process: values, losses, gradients by what a step makes of the weights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, float | str]:
    folder = tmp_path_factory.mktemp("spread")
    command = [sys.executable, "-m", "tests.ffn.spreading"]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(folder / "rendezvous"), str(folder / "answer.json")],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        said = [p.communicate(timeout=120)[0] for p in processes]
    finally:
        for p in processes:
            p.kill()
            p.wait()
    assert (folder / "answer.json").is_file(), "\n".join(said)
    return json.loads((folder / "answer.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("case", ["switch", "gshard", "st_moe", "experts", "gshard without capacity", "unequal", "evaluated"])
def test_two_processes_equal_one(found, case):
    assert found[case] < 1e-12


def test_refused(found):
    assert "count must be a multiple of the 2 processes, but model has 3 experts" in found["refused"]
    assert "model is spread already" in found["refused"]
    assert "model must have a mixture of experts to spread" in found["refused"]
