"""Kernels preempted while another process uses the GPU."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["head", "channel", "gated_delta", "kda", "erase"])
def test_two_processes_take_turns(family):
    command = [sys.executable, "-m", "tests.ops.triton.shared", family, "5"]
    with ThreadPoolExecutor(2) as pool:
        done = list(pool.map(lambda _: subprocess.run(command, capture_output=True, text=True, check=False, timeout=200), range(2)))
    for process in done:
        assert process.returncode == 0, process.stdout + process.stderr[-2000:]
