"""A conversion killed at any moment and resumed has the bits of an uninterrupted one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.convert.models import contents


def log(folder: Path) -> list[dict]:
    return [{k: v for k, v in json.loads(line).items() if k != "seconds"} for line in (folder / "log.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_killed_again_and_again(teacher, text, tmp_path):
    command = [sys.executable, "-m", "tests.convert.lives", str(tmp_path), str(teacher), str(text)]
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) > 2
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert list(contents(whole)) == ["model.safetensors"]
    assert contents(cut) == contents(whole)
    assert log(cut) == log(whole)
    assert (cut / "ranking.json").read_bytes() == (whole / "ranking.json").read_bytes()
    assert not [path for path in cut.iterdir() if path.name.endswith(".part") or path.name.startswith("checkpoint-")]
