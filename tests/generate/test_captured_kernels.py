"""Kernels in a captured step on a CPU, without extra threads for small work."""

import sys

import pytest
import torch

from linattn.generate import program
from linattn.generate.captured import Choice, step_of
from linattn.generate.prefill import prefill
from linattn.generate.sampling import greedy
from linattn.models import LanguageModel, LMConfig
from linattn.ops.cpu import library as cpu


@pytest.mark.skipif(cpu.reason() is not None, reason="there are no CPU kernels here")
def test_convolutions_and_norms_are_bound_to_their_kernels(monkeypatch):
    """Also a float32 norm with a bfloat16 weight, which may change later."""
    torch.manual_seed(0)
    called = []
    monkeypatch.setattr(program, "_again", lambda target, *_: called.append(str(target)))
    lm = LanguageModel(LMConfig(vocab_size=40, dim=64, layers=2, mixer="mamba2", ffn="none")).bfloat16().eval()
    ids = torch.randint(40, (1, 9))
    state = prefill(lm.model, ids)[1]
    step = step_of(lm.model, lm.lm_head, state, 100)
    assert not called
    norms = [p for name, p in lm.named_parameters() if ".mixer.norm" in name]
    assert norms and step.current()
    with torch.no_grad():
        norms[0].mul_(2)
    assert not step.current()


@pytest.mark.parametrize("mixer", ["gla", "gated_deltanet", "mamba2", "rwkv7"])
def test_a_step_calls_kernels_alone(mixer):
    """Launch overhead of torch operations between kernels exceeds their time, and lets a second thread fall asleep."""
    if cpu.reason():
        pytest.skip(cpu.reason())
    lm = LanguageModel(LMConfig(vocab_size=40, dim=32, layers=2, mixer=mixer)).bfloat16().eval()
    with torch.inference_mode():
        step = step_of(lm.model, lm.lm_head, prefill(lm.model, torch.zeros(1, 7, dtype=torch.int64))[1], 100)
        step.start(Choice(greedy, "greedy"))
    others = [str(getattr(call, "func", call)) for call in step._program.steps if getattr(call, "__module__", None) != cpu.__name__]
    assert not others
    assert len(step._program._runs) == 1  # all kernels, from the embedding to the likeliest token, are one call


THREADS = """
import os, sys, torch
from linattn.generate.captured import step_of
from linattn.generate.prefill import prefill
from linattn.models import LanguageModel, LMConfig
torch.set_num_threads(1)
models = [LanguageModel(LMConfig(dim=32, layers=2, mixer=mixer)).eval() for mixer in sys.argv[1:]]
with torch.inference_mode():
    states = [prefill(lm.model, torch.zeros(1, 7, dtype=torch.int64))[1] for lm in models]
    steps = [step_of(lm.model, lm.lm_head, state, 100) for lm, state in zip(models, states)]
    torch.set_num_threads(3)
    for step in steps:
        before = len(os.listdir("/proc/self/task"))
        for _ in range(3):
            step._program()
        print(len(os.listdir("/proc/self/task")) - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="it looks into /proc")
def test_a_small_step_wakes_no_thread(programs):
    """Beside a busy process each wake-up would wait for the scheduler, 50 times as long as the step."""
    if cpu.reason():
        pytest.skip(cpu.reason())
    done = programs.python("-c", THREADS, "gla", "slstm")
    assert done.stdout == "0\n0\n", done.stderr[-2000:]
