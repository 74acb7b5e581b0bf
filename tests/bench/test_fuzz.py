"""A log of random cases cut off by time has the first cases, and another run of the machine continues it."""

import argparse
import json
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from benchmarks import fuzz
from linattn.ops.cpu import library


def test_the_cases_done_are_the_first_ones():
    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(lambda i=i: (time.sleep(0.2 if i == 0 else 0.05), i)[1]) for i in range(40)]
        done = list(fuzz.results(pool, futures, latest=time.monotonic()))
    assert sorted(done) == list(range(len(done))) and len(done) < 40


def test_another_log_is_not_gone_on_with(tmp_path, capsys):
    path, parser = tmp_path / "log.json", argparse.ArgumentParser()
    log = {"schema": "linattn.fuzz", "seed": 1, "cpu": "one", "cases": 3}
    path.write_text(json.dumps(log))
    assert fuzz.read(parser, path, {"seed": 1, "cpu": "one"}) == log
    for wanted in ({"seed": 2, "cpu": "one"}, {"seed": 1, "cpu": "two"}):
        with pytest.raises(SystemExit):
            fuzz.read(parser, path, wanted)
    assert "another seed" in (said := capsys.readouterr().err) and "another cpu" in said


def test_the_log_says_by_which_instructions_and_nothing_runs_without_kernels(monkeypatch, capsys):
    parser = argparse.ArgumentParser(prog="fuzz")
    assert fuzz.instructions(parser, "triton") == {}
    monkeypatch.setattr(library, "reason", lambda: None)
    monkeypatch.setattr(library, "isa", lambda: "avx2")
    told = fuzz.instructions(parser, "cpu")
    assert told == {"native_isa": "avx2", "torch_cpu_capability": torch.backends.cpu.get_cpu_capability()}
    monkeypatch.setattr(library, "reason", lambda: "its kernels are not compiled")
    with pytest.raises(SystemExit):
        fuzz.instructions(parser, "cpu")
    assert capsys.readouterr().err == "fuzz: its kernels are not compiled\n"
