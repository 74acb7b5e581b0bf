"""The cost sheet against real runs and against formulas."""

import time

import pytest
import torch

import linattn
from linattn.mixers import available, create, info


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])  # in bfloat16 some states are float32 and some not
def test_state_bytes_and_parameters_are_those_of_a_run(dtype):
    """At another width and batch than in the conformance suite, which covers every mixer."""
    for name in [n for n in available() if info(n).resumable][::8]:
        mixer = create(name, dim=64).to(dtype)
        _, state = mixer(torch.zeros(3, 9, 64, dtype=dtype), return_state=True)
        said = linattn.cost(name, dim=64, tokens=9, batch=3, dtype=dtype)
        assert said.state_bytes == sum(t.nbytes for t in state.values()), name
        assert said.parameters == sum(p.numel() for p in mixer.parameters()), name


def test_gla_by_hand():
    d, t, h = 64, 100, 4
    said = linattn.cost("gla", dim=d, heads=h, tokens=t, batch=2, dtype=torch.float32)
    keys, values = d // 2, d
    weights = 2 * d * keys + 2 * d * values + d * 16 + 16 * keys + values * d
    assert said.parameters == weights + keys + values // h  # the gate's bias, the norm
    entries = h * (keys // h) * (values // h)
    assert said.flops == 2 * t * (2 * weights + 5 * entries)  # decay 1, write 2, read 2
    assert said.step_flops == said.flops // t
    assert said.state_bytes == 2 * (4 * entries + 8)
    assert said.softmax_cache_bytes == 2 * (2 * t * d * 4 + t + 8)  # keys, values, what is real, the position


def test_softmax_by_hand():
    d, t = 64, 100
    said = linattn.cost("softmax", dim=d, kv_heads=1, tokens=t)
    weights = 2 * d * d + 2 * d * 16
    assert said.flops == t * 2 * weights + 4 * d * t * (t + 1) // 2  # scores and their use, 2 each
    assert said.step_flops == 2 * weights + 4 * d * (t + 1)
    assert said.state_bytes == t * (2 * 16 * 2 + 1) + 8 and said.softmax_cache_bytes == t * (2 * 64 * 2 + 1) + 8


def test_convolutions_are_counted():
    d = 64
    said = linattn.cost("deltanet", dim=d, tokens=1)
    linear, conv, state = d * 3 * d + d * 4 + d * d, 3 * d * 4, d * d // 4
    assert said.flops == 2 * (linear + conv) + 8 * state


def test_a_long_context_takes_no_time_and_no_memory():
    linattn.cost("mamba2", dim=512, tokens=10)  # what is loaded on first use
    start = time.process_time()
    for name in ("mamba2", "softmax", "lstm"):
        linattn.cost(name, dim=512, tokens=100_000)
    assert time.process_time() - start < 3


def test_constant_state_against_a_growing_cache():
    short, long = (linattn.cost("gla", dim=64, tokens=t) for t in (1000, 2000))
    assert short.state_bytes == long.state_bytes
    assert long.softmax_cache_bytes - short.softmax_cache_bytes == 1000 * (2 * 64 * 2 + 1)


@pytest.mark.parametrize("dim", [1, 9, 30])  # widths at which softmax could not rotate four heads
def test_the_cache_beside_it_of_widths_that_four_heads_do_not_divide(dim):
    said = linattn.cost("linear", dim=dim, heads=1, tokens=100, batch=3)
    assert said.softmax_cache_bytes == 3 * (100 * (2 * dim * 2 + 1) + 8)


@pytest.mark.parametrize("name", ["efficientvit", "mbconv"])  # with batch norms
def test_a_grid_of_one_place(name):
    one, four = (linattn.cost(name, dim=32, tokens=tokens).flops for tokens in (1, 4))
    assert 0 < one < four


def test_no_steps_and_no_state_without_causality():
    d, t = 64, 100
    said = linattn.cost("softmax", dim=d, tokens=t, causal=False)
    assert said.flops == t * 8 * d * d + 4 * d * t * t
    assert said.step_flops is None and said.state_bytes is None


def test_no_tokens():
    said = linattn.cost("gla", dim=64, tokens=0)
    assert said.flops == 0 and said.softmax_cache_bytes == 8
    assert said.state_bytes == linattn.cost("gla", dim=64, tokens=5).state_bytes


def test_refusals():
    with pytest.raises(ValueError, match="tokens must be an integer of at least 0, but came as -1"):
        linattn.cost("gla", dim=64, tokens=-1)
    with pytest.raises(ValueError, match="batch must be an integer of at least 0, but came as '3'"):
        linattn.cost("gla", dim=64, tokens=1, batch="3")
    with pytest.raises(ValueError, match="dtype must be a torch.dtype of floating point, but came as 'bf16'"):
        linattn.cost("gla", dim=64, tokens=1, dtype="bf16")
    with pytest.raises(TypeError, match="no option 'head'"):
        linattn.cost("gla", dim=64, tokens=1, head=3)
    with pytest.raises(ValueError, match="did you mean 'gla'"):
        linattn.cost("glaa", dim=64, tokens=1)


def test_fused_attention_is_counted():
    """One seed that attends to n elements: four linear maps, two of them of all elements, and two products of n by d."""
    n, d = 100, 32
    assert linattn.cost("pma", dim=d, tokens=n).flops == 2 * d * d * (2 + 2 * n) + 4 * n * d
