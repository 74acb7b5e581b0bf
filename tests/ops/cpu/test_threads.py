"""The thread pool under ThreadSanitizer: no data races."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from linattn.ops.cpu import build

pytestmark = pytest.mark.slow
FIXED = ["setarch", os.uname().machine, "-R"]  # without address randomisation, which may overlap the sanitizer's memory


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """The test program of the pool; skips if the sanitizer cannot run."""
    path = tmp_path_factory.mktemp("threads") / "threads"
    try:
        command, _ = build._compiler()
    except build.NoCompilerError as error:
        pytest.skip(str(error))
    flags = ["-std=c++17", "-O1", "-g1", "-pthread", "-fsanitize=thread", f"-I{build.NATIVE}"]
    sources = [Path(__file__).with_name("threads.cpp"), build.NATIVE / "pool.cpp"]
    made = subprocess.run([*command, *flags, *map(str, sources), "-o", str(path)], capture_output=True, text=True)
    if made.returncode != 0 and "tsan" in made.stderr:
        pytest.skip("this compiler brings no ThreadSanitizer")
    assert made.returncode == 0, made.stderr
    if shutil.which("setarch") is None:
        pytest.skip("there is no setarch")
    return path


def run(program, *arguments):
    return subprocess.run([*FIXED, str(program), *arguments], capture_output=True, text=True, timeout=240)


@pytest.mark.parametrize("threads", ["1", "2", "8"])
def test_no_races(program, threads):
    done = run(program, threads)
    assert done.returncode == 0 and done.stdout == "right\n", done.stdout + done.stderr[-4000:]


def test_a_race_is_found(program):
    assert "data race" in run(program, "4", "race").stderr
