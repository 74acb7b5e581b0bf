"""HGRN2 against fla-core's recurrence, and its gates and read-out against the paper's formulas."""

import pytest
import torch
import torch.nn.functional as F

from linattn.mixers import create
from linattn.models import LanguageModel, LMConfig
from tests.oracles.compare import distance, fla, naive_distance


@pytest.mark.parametrize("lower_bound", [0.0, 0.7])
def test_fla(lower_bound):
    def naive(r):
        return fla("gla").naive_recurrent_gla(r.q, r.k, r.v, r.decay)[0]

    mixer = create("hgrn2", dim=64, head_dim=32, lower_bound=lower_bound)
    assert naive_distance(mixer, naive, 4 * torch.randn(2, 75, 64)) < 1e-5


@pytest.mark.parametrize("lower_bound", [0.0, 0.7])
def test_the_block_token_by_token(lower_bound):
    mixer = create("hgrn2", dim=64, head_dim=16, lower_bound=lower_bound).double()
    torch.nn.init.normal_(mixer.norm.weight)
    mixer.lower_bound.data += 0.1 * torch.rand(64)  # one per channel
    x, s, outputs = 4 * torch.randn(2, 30, 64, dtype=torch.float64), torch.zeros(2, 4, 16, 16, dtype=torch.float64), []
    lower = mixer.lower_bound.double()
    for token in x.unbind(1):
        alpha = lower + (1 - lower) * torch.sigmoid(token @ mixer.f_proj.weight.T)
        q, k, v, alpha = (
            t.view(2, 4, 16) for t in (F.silu(token @ mixer.q_proj.weight.T), 1 - alpha, token @ mixer.v_proj.weight.T, alpha)
        )
        s = alpha[..., None] * s + k[..., None] * v[:, :, None]
        o = torch.einsum("bhk,bhkv->bhv", q, s).flatten(1) / 4  # √16
        outputs.append(F.rms_norm(o, (64,), mixer.norm.weight, 1e-5) @ mixer.o_proj.weight.T)
    assert distance(mixer(x), torch.stack(outputs, 1)) < 1e-12


@pytest.mark.parametrize("mixer", ["hgrn", "hgrn2"])
def test_lower_bounds_rise_in_a_model_as_a_softmax_of_zeros_has_them(mixer):
    layers = LanguageModel(LMConfig(vocab_size=8, dim=32, layers=4, mixer=mixer, ffn="none")).model.layers
    share = torch.zeros(4, 32).softmax(0)
    assert torch.equal(torch.stack([layer.mixer.lower_bound for layer in layers]), share.cumsum(0) - share[0])
    options = {mixer: {"lower_bound": 0.5}}
    layers = LanguageModel(LMConfig(vocab_size=8, dim=32, layers=2, mixer=mixer, mixer_options=options, ffn="none")).model.layers
    assert all((layer.mixer.lower_bound == 0.5).all() for layer in layers)
