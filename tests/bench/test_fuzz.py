"""A log of random cases cut off by time has the first cases, and another run of the machine continues it."""

import argparse
import json
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from benchmarks import fuzz
from linattn.ops.cpu import library, linear_attention


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


def test_a_share_of_a_cpus_cases_are_steps(monkeypatch):
    """Tokens of their own with initial states, whose kernel saves nothing for gradients; a GPU's cases have none."""
    drawn = [fuzz.draw(seed, "cpu") for seed in range(400)]
    steps = [d for d in drawn if d.step]
    assert 0.2 < len(steps) / len(drawn) < 0.3 and not any(fuzz.draw(seed, "triton").step for seed in range(100))
    assert all(d.initial and (d.T == 1 if d.lengths is None else set(d.lengths) <= {1} and len(d.lengths) == d.T) for d in steps)
    saved = []
    monkeypatch.setattr(linear_attention, "_outputs", lambda *given: saved.append(given[2]) or outputs(*given))
    for d in (next(d for d in steps if (d.lengths is None) == dense) for dense in (True, False)):
        assert fuzz.once(d, fuzz.build(d).to(torch.float32), None)[1] == {}
    assert saved == [False, False]


outputs = linear_attention._outputs
