"""Properties of the selective scan that every backend must have."""

from collections.abc import Callable

import torch
from torch import Tensor

Run = Callable[[dict[str, Tensor]], tuple[Tensor, Tensor]]


def check_strong_decay(run: Run, a: dict[str, Tensor]) -> None:
    """Assert that tokens before a decay of e^-1e6 at token 70 of 150 change no bit of later outputs and of the last state."""
    a["dt"][:, 70], a["A"] = 1e6, a["A"] - 1.0
    other = {**a, "x": a["x"].clone(), "initial_state": 1e3 * a["initial_state"]}
    other["x"][:, :70] = 7.0
    for mine, theirs in zip(run(a), run(other), strict=True):
        assert torch.equal(mine[:, 70:] if mine.shape[1] == 150 else mine, theirs[:, 70:] if theirs.shape[1] == 150 else theirs)


def check_zero_step(run: Run, a: dict[str, Tensor]) -> None:
    """Assert that time steps of zero leave the state unchanged."""
    a["dt"] = torch.zeros_like(a["dt"])
    assert torch.equal(run(a)[1], a["initial_state"])
