"""transformers' Mamba, Falcon-Mamba and Jamba on our selective scan."""

from typing import ClassVar

import pytest

from tests.hf.patched import Agreement


@pytest.fixture(params=["mamba", "falcon_mamba", "jamba"])
def family(request):
    return request.param


class TestPatch(Agreement):
    op = "selective_scan"
    step = "selective_step_"
    pieces_of_theirs: ClassVar = {"mamba": 0.01, "falcon_mamba": 0.01, "jamba": 0.01}  # their scan starts from nothing in every call
    left_of_theirs = ("mamba",)  # what its projection adds stands at padding too, and the convolution reads it
