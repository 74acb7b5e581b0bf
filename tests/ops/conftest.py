"""Fixtures of the tests of operations."""

from collections.abc import Iterator

import pytest


@pytest.fixture
def _fresh() -> Iterator[None]:
    """Reset compiled graphs before and after a test."""
    import torch

    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def transformers_scan():
    """The loop of transformers' Mamba with the arguments of ``selective_scan`` by name; returns its outputs and its last state.

    transformers is loaded by the tests that run it: importing it takes longer than collecting tests/ops.
    """
    modeling = pytest.importorskip("transformers.models.mamba.modeling_mamba")
    if not hasattr(modeling, "mamba_selective_scan"):
        pytest.skip("this transformers has no scan function of its own")

    def scan(a):
        x, dt, b, c = (a[n].mT.contiguous() for n in ("x", "dt", "B", "C"))  # as its mixer calls it
        y, state = modeling.mamba_selective_scan(x, dt, a["A"], b, c, D=a["D"], return_last_state=True)
        return y.mT, state

    return scan
