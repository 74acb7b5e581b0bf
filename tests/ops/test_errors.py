"""Tolerances of results with cancelling terms: derived from rounding errors, and still tight enough to detect real errors."""

from functools import partial

import pytest
import torch

from tests.ops import definition, errors
from tests.ops.cases import Call, gradients, make

UNIT = 2.0**-24


def found(call: Call, name: str, change, outputs: tuple[str, ...] | None = None, exact: str = "reference") -> float:
    """Error over tolerance of the gradient of ``name``, computed exactly except ``change``, against ``exact``."""

    def run(asked: Call, outputs):
        out, grads = gradients(asked.double(), outputs, backend="reference")
        grads = {**grads, name: change(grads[name])}
        return {n: t.float() for n, t in out.items()}, {n: t.float() for n, t in grads.items()}

    return errors.ratios(call, torch.float32, run=run, exact=exact, outputs=outputs)[f"gradient of {name}"]


def test_the_sum_that_cancels():
    """o = q k v with q k = 1 - (1 - 2^-10) = 2^-10: each product errs by an ulp of 1, so o by about 2^10 of its ulps."""
    one = torch.ones(1, 1, 1, 2, dtype=torch.float64)
    k = torch.tensor([1.0, -1.0 + 2.0**-10], dtype=torch.float64).view(1, 1, 1, 2)
    call = Call({"q": one, "k": k, "v": one[..., :1]}, {"return_state": True, "scale": 1.0})
    spread = definition.deviations(call, torch.float32, samples=64)["o"].item()
    assert UNIT < spread < 4 * UNIT  # q, k and v of two terms: the square root of 6


def test_a_factor_that_cancels():
    """The gradient of a state at beta |k|^2 = 1 - 2^-12 is 2^-12 of the incoming one, and 1 - 2^-12 is rounded like 1."""
    one = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    call = Call({"q": 0 * one, "k": one, "v": one, "beta": one[..., 0] * (1 - 2.0**-12), "S": one}, {"return_state": True})
    spread = definition.deviations(call, torch.float32, ("S",), samples=64)["gradient of S"].item()
    assert 0.5 * UNIT < spread < 4 * UNIT


@pytest.mark.parametrize("wrong", [0.0, 1e-3])
def test_a_form_that_cancels_accuses_nobody(wrong):
    """A float64 chunk keeps 16 digits of a gradient's value before 64 factors 1 - beta |k|^2, not after them."""
    call = make("beta", "none", B=1, T=64, H=1, K=1, V=2).to(torch.float32).double()
    right, chunk = (gradients(call, ("S",), backend=backend)[1]["S"] for backend in ("reference", "torch"))
    assert errors.error(chunk, right) > 0.1
    assert (found(call, "S", lambda t: t * (1 + wrong), ("S",), exact="torch") <= 1) == (wrong == 0)


def test_below_the_smallest_number():
    """Gradients through a decay of e^-88, subnormal in float32, may be 0; those through e^-60 may not."""
    for strength, lost in ((88.0, True), (60.0, False)):
        call = make("plain", "H", B=1, T=9, strength=strength)
        for name in ("S", "decay"):
            assert (found(call, name, torch.zeros_like) <= 1) == lost, (strength, name)


def test_two_decays_whose_product_is_below_it():
    """Neither e^-44 is lost, only their product."""
    call = make("plain", "BTH", B=1, T=2, strength=44.0)
    weaker = call.with_(decay=call.tensors["decay"] / 2)
    assert found(call, "S", torch.zeros_like, ("S",)) <= 1 < found(weaker, "S", torch.zeros_like, ("S",))
    silent = call.with_(v=torch.zeros_like(call.tensors["v"]))
    assert errors.rounding(silent, torch.float32)["S"].norm() > silent()["S"].norm() > 0


@pytest.mark.parametrize("kind", ["plain", "beta", "erase", "bonus"])
def test_a_wrong_sum_is_seen(kind):
    """A relative error of 3e-5 in the gradient of a decay per head is detected where sums cancel to a tenth at most."""
    call = make(kind, "H", B=1, T=64, K=8, V=8, seed=2)
    scaled = partial(torch.mul, other=1 + 3e-5)
    assert found(call, "decay", lambda t: t) <= 1 < found(call, "decay", scaled)
