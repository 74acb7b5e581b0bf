"""Tokens a second, model FLOPs utilisation and memory, in the progress line and in the integrations' logs."""

import importlib.util
import json
import math

import pytest
import torch

from linattn.hf import LMConfig
from linattn.mixers import cost
from linattn.train import checkpoint, train
from linattn.train.progress import Recorder
from linattn.train.speed import Meter, meter, peak_of, token_flops
from tests.train.runs import options


def test_operations_of_a_token():
    """A softmax layer against an explicit count: 8 D² of maps, 4 D T/2 of causal attention, 6 D F of SwiGLU; 2 D V of the head."""
    dim, context, vocab, inner = 64, 128, 1000, 96
    config = LMConfig(vocab_size=vocab, dim=dim, layers=3, mixer="softmax", ffn="swiglu", ffn_dim=inner)
    hand = 3 * (2 * dim * vocab + 3 * (8 * dim**2 + 4 * dim * (context + 1) / 2 + 6 * dim * inner))
    assert token_flops(config, context) == pytest.approx(hand, rel=0.02)
    hybrid = LMConfig(vocab_size=vocab, dim=dim, layers=2, mixer="gla, softmax", ffn="none", mixer_options={"gla": {"heads": 2}})
    mixers = cost("gla", dim=dim, tokens=context, heads=2).flops + cost("softmax", dim=dim, tokens=context).flops
    assert token_flops(hybrid, context) == pytest.approx(3 * (2 * dim * vocab + mixers / context))


@pytest.mark.parametrize("mixer", ["rwkv7", "yoco"])
def test_layers_that_need_a_tensor_of_the_first_one(mixer, text, tmp_path):
    """Their operations are counted separately, without the first layer, before a training starts."""
    config = LMConfig(vocab_size=100, dim=64, layers=2, mixer=mixer, ffn="none")
    first, later = (cost(mixer, dim=64, tokens=32, **config.options_of(i)) for i in range(2))
    low_rank = 2 * 32 * 64 * 32 * 2 if mixer == "rwkv7" else -(2 * 32 * 64 * 64 * 2)  # two more maps of rank 32; without keys and values
    assert later.flops - first.flops == low_rank
    assert token_flops(config, 32) == 3 * (2 * 100 * 64 + (first.flops + later.flops) / 32)
    result = train(options(tmp_path / "run", text, mixer=mixer, dim=32, layers=2, steps=1), progress=False)
    assert result.validation_bits_per_byte > 0


def test_utilisation():
    measured = Meter(2e9, 1e15, False).measured(100_000.0)
    assert measured["mfu"] == pytest.approx(0.2) and measured["tokens_per_second"] == 100_000 and 0.01 < measured["memory_gb"] < 1e3
    assert "mfu" not in meter(LMConfig(dim=32, layers=1, mixer="gla"), 16, torch.device("cpu"), 1).measured(1.0)
    assert peak_of("NVIDIA H200") == peak_of("NVIDIA H100 80GB HBM3") == 989e12
    assert peak_of("NVIDIA H100 PCIe") == 756e12 and peak_of("NVIDIA GeForce RTX 4090") == 165e12 and peak_of("a card") is None


def test_the_speed_is_that_of_the_last_interval_of_the_log(tmp_path):
    """So later figures exclude a slow start with compilation, and earlier processes."""
    recorder = Recorder(tmp_path / "x", [], {"step": 10, "seconds": 5.0, "losses": []}, step_tokens=100, bits_per_byte=float)
    recorder.seconds = 7.0
    assert recorder.speed(14) == recorder.log_speed(14) == {"tokens_per_second": 200.0}
    recorder.seconds = 7.5
    assert recorder.speed(15) == {"tokens_per_second": 200.0}, "until the next log"
    assert recorder.log_speed(19)["tokens_per_second"] == pytest.approx(1000.0, rel=1e-2)


def test_it_stands_in_the_logs(text, tmp_path):
    result = train(options(tmp_path / "run", text, steps=2, eval_every=1), progress=False)
    state = json.loads((checkpoint.newest(result.run) / "trainer_state.json").read_text())
    logs = [line for line in state["log_history"] if "loss" in line]
    assert all(line["tokens_per_second"] > 0 and line["memory_gb"] > 0 for line in logs) and len(logs) == 2
    config = LMConfig(vocab_size=256, dim=32, layers=2, mixer="gla, softmax")
    assert math.isclose(state["total_flos"], 2 * 32 * int(token_flops(config, 16)), rel_tol=1e-6)


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="tensorboard is not installed")
def test_tensorboard(text, tmp_path):
    train(options(tmp_path / "run", text, steps=2, eval_every=1, report_to=("tensorboard",)), progress=False)
    assert list((tmp_path / "run").rglob("events.out.tfevents.*"))
