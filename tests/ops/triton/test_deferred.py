"""Steps whose states are written at every n-th call, by the kernel and in operations of torch, against the float64 reference."""

import numpy as np
import pytest
import torch

from linattn.ops import checks
from linattn.ops.inputs import Given
from linattn.ops.torch import deferred as portable
from tests.ops.cases import RANKS, make
from tests.ops.triton.device import DEVICE, HALVES, here

pytest.importorskip("triton")

from linattn.ops.triton import deferred

LIMIT = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}
BOTH = pytest.mark.parametrize("step_", [portable.step_, deferred.step_], ids=["torch", "kernel"])


def steps(call, slots: int, step_, dtype=torch.float32):
    """Outputs of all tokens of ``call``, and after each the state in memory and the state with pending tokens written."""
    call = here(call.to(dtype))
    x = checks.call(Given(**call.arguments()))[0]
    state = x.initial.clone()
    outputs, states, kept = [], [], None
    for t in range(x.v.shape[1]):
        now = checks.call(Given(**call.tokens(t, t + 1).with_(S=state).arguments()))[0].flat
        assert deferred.refusal(now) is None
        if kept is None:
            kept = portable.empty(now, len(state), slots, torch.zeros(1, dtype=torch.int64, device=DEVICE))
        outputs.append(step_(now._replace(initial=state), kept))
        kept.calls.add_(1)
        states.append((state.clone(), portable.written(state, kept, int(kept.calls) % slots)))
    return torch.cat(outputs, 1), states


def exact(call, dtype=torch.float32):
    """Outputs of all tokens and the states after each."""
    call = here(call.to(dtype)).to(torch.float64)
    found = [call.tokens(0, t + 1)("recurrent", "torch") for t in range(call.tensors["v"].shape[1])]
    return found[-1]["o"], [one["S"] for one in found]


def error(x, wanted) -> float:
    return ((x.double() - wanted).norm() / wanted.norm()).item()


@BOTH
@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("kind", ["plain", "beta"])
def test_every_rule_and_decay(kind, rank, step_):
    """Two and a half rounds of slots, grouped heads, sizes that are no multiples of a tile."""
    call = make(kind, rank, B=2, T=8, H=4, Hk=2, K=6, V=5)
    o, states = steps(call, 3, step_)
    wanted, wanted_states = exact(call)
    assert error(o, wanted) < 2e-6
    for t, ((in_memory, now), then) in enumerate(zip(states, wanted_states, strict=True)):
        assert error(now, then) < 2e-6
        last = t + 1 - (t + 1) % 3
        assert error(in_memory, wanted_states[last - 1] if last else here(call).tensors["S"].double()) < 2e-6


@BOTH
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("kind", ["plain", "beta"])
def test_half_precision(kind, dtype, step_):
    call = make(kind, "BTHK", T=5, H=1, K=8, V=16)
    o, states = steps(call, 4, step_, dtype)
    wanted, wanted_states = exact(call, dtype)
    assert error(o, wanted) < LIMIT[dtype] and error(states[-1][1], wanted_states[-1]) < 2e-6


@BOTH
@pytest.mark.parametrize("rank", ["BTH", "BTHK"])
def test_a_reset_clears_everything(rank, step_):
    """Including infinities in the state and in the slots."""
    call = make("plain", rank, B=1, T=7, H=2, K=4, V=4)
    decay, v = call.tensors["decay"].clone(), call.tensors["v"].clone()
    decay[:, 3] = float("-inf")
    v[:, 1] = 1e30
    poisoned = call.with_(decay=decay, v=v, S=torch.full_like(call.tensors["S"], float("inf")))
    clean = poisoned.tokens(3, 7).with_(S=torch.zeros_like(call.tensors["S"]))
    with np.errstate(invalid="ignore"):  # of the tokens before it
        o, states = steps(poisoned, 5, step_)
    wanted, wanted_states = exact(clean)
    assert error(o[:, 3:], wanted) < 2e-6
    assert error(states[-1][0], wanted_states[1]) < 2e-6 and error(states[-1][1], wanted_states[-1]) < 2e-6


def test_slots_of_zeros_change_nothing():
    """A row that joins between two writes has zeros for earlier tokens."""
    call = make("beta", "BTH", B=2, T=6, H=2, K=4, V=4)
    x = checks.call(Given(**here(call.tokens(0, 1)).arguments()))[0].flat
    kept = portable.empty(x, 2, 4, torch.full((1,), 2, dtype=torch.int64, device=DEVICE))
    late = x.initial.clone()
    o = deferred.step_(x._replace(initial=late), kept)
    wanted = here(call.tokens(0, 1)).to(torch.float64)("recurrent", "torch")
    assert error(o, wanted["o"]) < 2e-6 and error(portable.written(late, kept, 3), wanted["S"]) < 2e-6


def test_refusals():
    def said(kind, **options):
        call = make(kind, "BTH", **{"T": 1, "H": 1, "K": 4, "V": 4, **options}).to(torch.float32)
        return deferred.refusal(checks.call(Given(**call.arguments()))[0].flat)

    assert "plain rule and the delta rule" in said("erase") and "plain rule and the delta rule" in said("normalize")
    assert "one token" in said("plain", T=2) and "256 channels, not 512" in said("plain", K=512)
    assert said("plain") is None
