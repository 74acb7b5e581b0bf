"""The kernels of a captured step compile for a Hopper and overlap their launches, checked without one."""

import json
import subprocess
import sys

import pytest

pytest.importorskip("triton")


@pytest.mark.slow
def test_they_overlap(tmp_path):
    command = [sys.executable, "-m", "tests.generate.compiling"]
    environment = {"TRITON_CACHE_DIR": str(tmp_path), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    kernels = json.loads(done.stdout.splitlines()[-1])
    linears = ["vector_kernel"] * 3 + ["forward_kernel", "tile_kernel"] * 3
    assert [k["name"] for k in kernels] == [
        *linears,
        "step_kernel",
        "step_kernel",
        "recurrence",
        *["weigh", "deferred_step"] * 2,
        "rows_kernel",
    ]
    kernels.pop()
    alone = kernels.pop(-6)
    assert (alone["starts"], alone["waits"]) == (0, 0), alone
    for kernel in kernels:
        assert (kernel["starts"], kernel["waits"]) == (1, 1), kernel
        assert kernel["loads"] > 0 or kernel["name"] == "weigh", f"{kernel['name']} reads no weights before it waits"
