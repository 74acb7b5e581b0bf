"""Time and memory by counts instead of clocks: no loop over tokens, nothing quadratic, no tensor [B, T, H, K, V]."""

import time
from functools import cache

import pytest
import torch

from tests.ops.cases import KINDS, RANKS, Call, gradients, make
from tests.ops.meter import Meter, measured, size

CASES = [(kind, rank) for kind in KINDS for rank in ("none", "BTH", "BTHK")] + [("plain", "H"), ("plain", "HK")]


def call_of(kind: str, rank: str, T: int, **sizes: object) -> Call:
    return make(kind, rank, **{"B": 1, "H": 2, "K": 32, "V": 32, **sizes}, T=T, initial=kind == "plain").to(torch.float32)


@cache
def counted(kind: str, rank: str, T: int, backward: bool) -> tuple[int, int]:
    """Number of operations, and bytes of their results."""
    meter = measured(call_of(kind, rank, T), backward=backward)
    return meter.operations, meter.made


def test_the_meter_counts():
    with Meter() as meter:
        x = torch.ones(10, 10)
        y = (x + 1)[:5]
        del x
        z = y.sum()
    assert (meter.operations, meter.largest, meter.shape, meter.made) == (4, 400, (10, 10), 804)
    assert meter.peak == 800 and meter.alive == 404
    del y, z
    assert meter.alive == 0


def test_the_meter_sees_a_token_loop_and_a_large_tensor():
    """The recurrent form is a loop over time, so the checks below can fail."""
    call = call_of("plain", "BTH", 256)
    assert measured(call, "recurrent").operations > 2 * 256
    with Meter() as meter:
        torch.einsum("bthk,bthv->bthkv", call.tensors["k"], call.tensors["v"])
    assert meter.largest > 4 * size(call)


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize(("kind", "rank"), CASES)
def test_no_loop_over_tokens(kind, rank, backward):
    """As many operations for 225 tokens as for 255, and each further chunk, of 32 or 64, takes fewer than 32."""
    (some, _), (more, _), (few, _), (many, _) = (counted(kind, rank, T, backward) for T in (225, 255, 512, 1024))
    assert some == more
    assert many - few < 32 * 512 // (32 if kind in ("beta", "erase") or rank in ("HK", "BTHK") else 64)


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize(("kind", "rank"), CASES)
def test_operations_and_bytes_are_linear_in_time(kind, rank, backward):
    """Indexing a tensor inside a loop over chunks would make the bytes of its backward quadratic."""
    one, two = (counted(kind, rank, T, backward) for T in (512, 1024))
    assert two[0] <= 2.1 * one[0]
    assert two[1] <= 2.1 * one[1]


@pytest.mark.parametrize(("kind", "rank"), CASES)
def test_no_tensor_is_larger_than_a_few_times_the_arguments(kind, rank):
    call = call_of(kind, rank, 1024, K=64, V=64)
    for backward in (False, True):
        meter = measured(call, backward=backward)
        assert meter.largest <= 2 * size(call), f"{meter.shape} has {meter.largest / size(call):.1f} x the bytes of the arguments"


@pytest.mark.parametrize(("kind", "rank"), CASES)
def test_memory_is_linear_in_time_and_a_small_multiple_of_the_arguments(kind, rank):
    """Peak live bytes over forward and backward."""
    one, two = (measured(call_of(kind, rank, T, K=64, V=64), backward=True) for T in (512, 1024))
    assert two.peak <= 2.1 * one.peak
    assert two.peak <= 40 * size(call_of(kind, rank, 1024, K=64, V=64)), f"{two.peak / size(call_of(kind, rank, 1024, K=64, V=64)):.0f} x"


@pytest.mark.parametrize("kind", KINDS)
def test_packed_memory_does_not_grow_with_the_longest_sequence(kind):
    """Packing one long and many short sequences costs in proportion to the tokens, not N times the longest."""
    even = make(kind, "BTH", lengths=(32,) * 32, K=16, V=16).to(torch.float32)
    skewed = make(kind, "BTH", lengths=(1024 - 31, *(1,) * 31), K=16, V=16).to(torch.float32)
    assert measured(skewed, backward=True).peak <= 3 * measured(even, backward=True).peak


def test_nothing_is_kept_after_backward():
    call = call_of("beta", "BTH", 256)
    with Meter() as meter:
        _, grads = gradients(call, form="chunk")
        kept = sum(g.nbytes for g in grads.values())
    assert meter.alive <= 2.5 * kept + 4 * size(call)
    del grads, _
    assert meter.alive == 0


def test_no_grad_forward_holds_no_more_than_it_needs():
    """Without gradients temporaries of chunks are freed."""
    with torch.no_grad():
        one, two = (self_peak(T) for T in (4096, 8192))
    assert two <= 2.1 * one


def self_peak(T: int) -> int:
    with Meter() as meter:
        call_of("plain", "BTHK", T)("chunk")
    return meter.peak


def seconds(call: Call, backward: bool) -> float:
    """CPU time of this thread, the best of three."""
    best = float("inf")
    for _ in range(3):
        start = time.thread_time()
        gradients(call, form="chunk") if backward else call("chunk")
        best = min(best, time.thread_time() - start)
    return best


@pytest.mark.slow
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize(("kind", "rank"), CASES)
def test_time_is_linear_to_65536_tokens(kind, rank, backward):
    short, long = (call_of(kind, rank, T, H=4, K=64, V=64) for T in (8192, 65536))
    assert seconds(long, backward) <= 1.6 * 8 * seconds(short, backward)


@pytest.mark.parametrize("rank", RANKS)
def test_a_decode_step_is_a_handful_of_operations(rank):
    """One token with a state: nothing is padded to a chunk."""
    call = make("plain", rank, B=4, T=1, K=64, V=64).to(torch.float32)
    with torch.no_grad(), Meter() as meter:
        call("auto", "auto")
    assert meter.operations <= 80 and meter.largest <= call.tensors["S"].nbytes
