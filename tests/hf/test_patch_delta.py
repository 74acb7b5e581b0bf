"""transformers' Qwen3-Next, Qwen3.5, OLMo hybrid and Kimi Linear on our delta rule."""

import pytest

from tests.hf.agreement import Agreement


@pytest.fixture(params=["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid", "kimi_linear"])
def family(request):
    return request.param


class TestPatch(Agreement):
    op = "linear_attention"
    step = "recurrent_step_"
