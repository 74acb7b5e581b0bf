"""One writer per folder at a time, and recovery after a writer's death."""

import os
import subprocess
import sys

import pytest

from linattn.state import empty, only_writer

HOLD = """
import sys
from pathlib import Path
from linattn.state import only_writer
with only_writer(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that writes to ``tmp_path / "out"``."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, tmp_path / "out"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_the_second_writer_is_refused_at_once_and_told_who_the_first_is(holder, tmp_path):
    said = rf"another process \(pid {holder.pid}\) is writing to .*out: wait until it ends, or choose another folder"
    with pytest.raises(ValueError, match=said), only_writer(tmp_path / "out"):
        raise AssertionError("two writers")
    holder.communicate()
    with only_writer(tmp_path / "out"):
        pass


def test_a_writer_that_was_killed_is_in_nobodys_way(holder, tmp_path):
    holder.kill()
    holder.wait()
    with only_writer(tmp_path / "out"), pytest.raises(ValueError, match=rf"\(pid {os.getpid()}\)"), only_writer(tmp_path / "out"):
        raise AssertionError("two writers")


def test_a_writer_without_a_name_is_one_too(tmp_path):
    with only_writer(tmp_path):
        (tmp_path / ".lock.pid").unlink()
        with pytest.raises(ValueError, match="another process is writing to"), only_writer(tmp_path):
            raise AssertionError("two writers")


def test_what_a_lock_leaves_is_no_content(tmp_path):
    assert empty(tmp_path / "none")
    with only_writer(tmp_path / "a" / "b"):
        assert empty(tmp_path / "a" / "b")
    assert empty(tmp_path / "a" / "b")
    assert not (tmp_path / "a" / "b" / ".lock.pid").exists()
    assert not empty(tmp_path / "a")
