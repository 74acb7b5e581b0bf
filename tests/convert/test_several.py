"""Two processes with half of every batch each reach the weights of one with both halves."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from linattn.distill.conversion import convert
from linattn.distill.processes import Group, device_of, started
from tests.convert.several import OPTIONS


@pytest.mark.slow
def test_two_processes(teacher, text, tmp_path):
    out = tmp_path / "two"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "tests.convert.several"]
    command = [*launcher, str(out), str(teacher), str(text)]
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("copied the teacher") == 1
    one = convert(teacher, text=[str(text)], out=tmp_path / "one", accumulate=2, progress=False, device="cpu", **OPTIONS)
    found, wanted = (load_file(folder / "model.safetensors") for folder in (out, one.folder))
    whole = load_file(teacher / "model.safetensors")
    for name, t in wanted.items():
        torch.testing.assert_close(found[name], t, rtol=1e-4, atol=1e-5)
    assert (wanted["lm_head.weight"] - whole["model.embedding.weight"]).abs().max() > 1e-3  # steps are far larger than the tolerance
    again = subprocess.run(command, env=environment, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert again.returncode == 0 and "stage" not in again.stderr, again.stderr


def test_shares_are_the_batch():
    assert [list(Group(3, rank).share(range(12, 18))) for rank in range(3)] == [[12, 13], [14, 15], [16, 17]]


def test_batches_that_processes_do_not_divide_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    with (
        pytest.raises(ValueError, match="the 3 processes must divide the sequences of a step, but there are 4"),
        started(torch.device("cpu"), [6, 4]),
    ):
        pass


def test_a_card_that_is_hidden_is_not_asked(monkeypatch):
    """As with a CUDA build of torch and empty CUDA_VISIBLE_DEVICES."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    for available, device in ((True, "cuda"), (False, "cpu")):
        monkeypatch.setattr(torch.accelerator, "is_available", lambda available=available: available)
        assert device_of(None).type == device
