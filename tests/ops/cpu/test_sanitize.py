"""The tests of the kernels under address and undefined-behaviour sanitizers, in a separate process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from linattn.ops.cpu import build

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
ABOVE = "contract or compiled or full_graph or faster or forks"  # slow tests without further kernel calls
OTHERS = ("test_arm.py", "test_build.py", "test_threads.py", Path(__file__).name)  # these build their own libraries and programs
FILES = sorted(path for path in HERE.glob("test_*.py") if path.name not in OTHERS)


def runtime():
    """The sanitizer's runtime, to be preloaded."""
    try:
        command, _ = build._compiler()
    except build.NoCompilerError as error:
        pytest.skip(str(error))
    path = subprocess.run([*command, "-print-file-name=libasan.so"], capture_output=True, text=True).stdout.strip()
    if sys.platform != "linux" or not os.path.isabs(path):
        pytest.skip("this compiler brings no libasan.so")
    return path


@pytest.mark.slow
@pytest.mark.skipif(os.environ.get("LINATTN_CPU_SANITIZE") == "1", reason="this is the process")
def test_clean_under_the_sanitizers():
    environment = {n: x for n, x in os.environ.items() if not n.startswith("PYTEST")}
    environment |= {"LD_PRELOAD": runtime(), "LINATTN_CPU_SANITIZE": "1", "OMP_NUM_THREADS": "1"}
    environment |= {"ASAN_OPTIONS": "detect_leaks=0"}  # leaks of Python itself
    build.build(sanitize=True)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-s",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "-m",
        "not slow",
        "-k",
        f"not ({ABOVE})",
    ]
    done = subprocess.run([*command, *FILES], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-3000:] + done.stderr[-3000:]
