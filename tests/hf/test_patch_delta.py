"""transformers' Qwen3-Next, Qwen3.5, OLMo hybrid and Kimi Linear on our delta rule."""

import pytest
import torch

from linattn.hf.patch import patch_transformers
from tests.hf.agreement import Agreement
from tests.hf.patched import shared_model


@pytest.fixture(params=["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid", "kimi_linear"])
def family(request):
    return request.param


class TestPatch(Agreement):
    op = "linear_attention"
    step = "recurrent_step_"


def test_kimi_keeps_slow_decays():
    gate = shared_model("kimi_linear").model.layers[0].self_attn.forget_gate
    hidden = torch.randn(2, 5, gate.f_a_proj.in_features)
    with torch.no_grad():
        wide = [w.double() for w in (gate.f_a_proj.weight, gate.f_b_proj.weight, gate.dt_bias, gate.A_log)]
        x = hidden.double() @ wide[0].T @ wide[1].T
        shift = -12 - x.mean()
        exact = -wide[3].exp() * torch.nn.functional.softplus(x + wide[2] + shift).unflatten(-1, (-1, gate.head_dim))
        kept = gate.dt_bias.clone()
        gate.dt_bias += shift.float()
        try:
            theirs = gate(hidden)
            with patch_transformers(["kimi_linear"]):
                ours = gate(hidden)
        finally:
            gate.dt_bias.copy_(kept)
    assert (ours / exact - 1).abs().max() < 1e-4
    assert (theirs / exact - 1).abs().max() > 1e-3  # fails once theirs is exact
