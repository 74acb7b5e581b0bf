"""transformers' Mamba-2, Bamba, Zamba2, Nemotron-H and Granite hybrid on our recurrence."""

from typing import ClassVar

import pytest

from tests.hf.agreement import Agreement


@pytest.fixture(params=["mamba2", "bamba", "zamba2", "nemotron_h", "granitemoehybrid"])
def family(request):
    return request.param


class TestPatch(Agreement):
    op = "linear_attention"
    step = "selective_step_"
    pieces_of_theirs: ClassVar = dict.fromkeys(
        ("mamba2", "zamba2", "nemotron_h"), 1e-3
    )  # the limits of the time step hold for prompts alone
    left_of_theirs = ("mamba2", "zamba2", "nemotron_h")
