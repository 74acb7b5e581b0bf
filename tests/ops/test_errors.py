"""What a float32 or half result may err by where its terms cancel: it follows from their rounding, and an error beyond it is still seen."""

from functools import partial

import pytest
import torch

from tests.ops import definition, errors
from tests.ops.cases import Call, gradients, make

UNIT = 2.0**-24


def found(call: Call, name: str, change, outputs: tuple[str, ...] | None = None, exact: str = "reference") -> float:
    """Error over what is allowed of the gradient of ``name``, computed exactly but for ``change``, as held against ``exact``."""

    def run(asked: Call, outputs):
        out, grads = gradients(asked.double(), outputs, backend="reference")
        grads = {**grads, name: change(grads[name])}
        return {n: t.float() for n, t in out.items()}, {n: t.float() for n, t in grads.items()}

    return errors.ratios(call, torch.float32, run=run, exact=exact, outputs=outputs)[f"gradient of {name}"]


def test_the_sum_that_cancels():
    """o = q k v with q k = 1 - (1 - 2^-10) = 2^-10: each product errs by a unit of 1, so o by about 2^10 units of itself."""
    one = torch.ones(1, 1, 1, 2, dtype=torch.float64)
    k = torch.tensor([1.0, -1.0 + 2.0**-10], dtype=torch.float64).view(1, 1, 1, 2)
    call = Call({"q": one, "k": k, "v": one[..., :1]}, {"return_state": True, "scale": 1.0})
    spread = definition.deviations(call, torch.float32, samples=64)["o"].item()
    assert UNIT < spread < 4 * UNIT  # q, k and v of two terms: the square root of 6


def test_a_factor_that_cancels():
    """The gradient of a state at beta |k|^2 = 1 - 2^-12 is 2^-12 of what comes back, and 1 - 2^-12 has been rounded like 1."""
    one = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    call = Call({"q": 0 * one, "k": one, "v": one, "beta": one[..., 0] * (1 - 2.0**-12), "S": one}, {"return_state": True})
    spread = definition.deviations(call, torch.float32, ("S",), samples=64)["gradient of S"].item()
    assert 0.5 * UNIT < spread < 4 * UNIT


@pytest.mark.parametrize("wrong", [0.0, 1e-3])
def test_a_form_that_cancels_accuses_nobody(wrong):
    """Of a gradient that passes 64 factors 1 - beta |k|^2, a chunk in float64 keeps 16 digits of what it was before them."""
    call = make("beta", "none", B=1, T=64, H=1, K=1, V=2).to(torch.float32).double()
    right, chunk = (gradients(call, ("S",), backend=backend)[1]["S"] for backend in ("reference", "torch"))
    assert errors.error(chunk, right) > 0.1
    assert (found(call, "S", lambda t: t * (1 + wrong), ("S",), exact="torch") <= 1) == (wrong == 0)


def test_below_the_smallest_number():
    """Gradients that pass a decay of e^-88, no normal number of float32, may be 0; those past e^-60 may not."""
    for strength, lost in ((88.0, True), (60.0, False)):
        call = make("plain", "H", B=1, T=9, strength=strength)
        for name in ("S", "decay"):
            assert (found(call, name, torch.zeros_like) <= 1) == lost, (strength, name)


def test_two_decays_whose_product_is_below_it():
    """Neither e^-44 is lost, but what both multiply."""
    call = make("plain", "BTH", B=1, T=2, strength=44.0)
    weaker = call.with_(decay=call.tensors["decay"] / 2)
    assert found(call, "S", torch.zeros_like, ("S",)) <= 1 < found(weaker, "S", torch.zeros_like, ("S",))
    silent = call.with_(v=torch.zeros_like(call.tensors["v"]))
    assert errors.rounding(silent, torch.float32)["S"].norm() > silent()["S"].norm() > 0


@pytest.mark.parametrize("kind", ["plain", "beta", "erase", "bonus"])
def test_a_wrong_sum_is_seen(kind):
    """The gradient of a decay per head, wrong by 3e-5 of itself, where nothing cancels to less than a tenth."""
    call = make(kind, "H", B=1, T=64, K=8, V=8, seed=2)
    scaled = partial(torch.mul, other=1 + 3e-5)
    assert found(call, "decay", lambda t: t) <= 1 < found(call, "decay", scaled)
