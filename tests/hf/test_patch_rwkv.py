"""transformers' RWKV on our scans."""

import pytest

from tests.hf.agreement import Agreement


@pytest.fixture(params=["rwkv"])
def family(request):
    return request.param


class TestPatch(Agreement):
    op = "diagonal_scan"
    step = "wkv_step"
    left_of_theirs = ("rwkv",)  # it ignores the mask
