"""Preconditioned KDA against fla-core's recurrence, and in float64 against the paper's token by token."""

import pytest
import torch
import torch.nn.functional as F

from linattn.mixers import CallContext, create
from tests.oracles.compare import distance, fla
from tests.oracles.test_precond_gated_deltanet import assert_run, curvature_gates, example, preconditioned_loop, unit


def parts(mixer, x):
    """q, k and v behind convolutions and α's logarithm, [B, T, H, K], and β [B, T, H]."""
    q, k, v = mixer.conv(mixer.qkv_proj(x), CallContext(x)).unflatten(-1, (3, mixer.heads, mixer.size)).unbind(2)
    low, high = mixer.decay_proj
    rate = F.softplus((x @ low.weight.T @ high.weight.T).unflatten(-1, (mixer.heads, -1)) + mixer.dt_bias)
    return unit(q), unit(k), v, -mixer.A_log.exp()[:, None] * rate, mixer.largest_beta * torch.sigmoid(x @ mixer.b_proj.weight.T)


def read(mixer, o, x):
    low, high = mixer.g_proj
    gate = torch.sigmoid(x @ low.weight.T @ high.weight.T + high.bias)
    return (F.rms_norm(o, o.shape[-1:], mixer.norm.weight, 1e-5).flatten(2) * gate) @ mixer.o_proj.weight.T


@pytest.mark.parametrize("squash", [1.5, 2.0])
def test_fla(squash):
    torch.manual_seed(0)
    mixer, x = create("precond_kda", dim=64, squash=squash), 2 * torch.randn(2, 75, 64)
    torch.nn.init.normal_(mixer.curvature_center)
    with torch.no_grad():
        q, k, v, decay, beta = parts(mixer, x)
        gamma, eta = curvature_gates(mixer, x)
        o, s, a = fla("precond_kda").naive_recurrent_precond_kda(
            q, k, v, decay, gamma, eta, beta, output_final_state=True, x=squash, log_atk_scale=mixer.curvature_center
        )
        y, state = mixer(x, return_state=True)
        assert distance(y, read(mixer, o, x)) < 1e-5
        assert distance(state["S"], s) < 1e-5
        assert distance(state["curvature"], a.flatten(1)) < 1e-5


@pytest.mark.parametrize("options", [{}, {"heads": 2, "size": 5, "squash": 2.0}])
def test_values_states_and_gradients(options):
    mixer, x = example("precond_kda", **options)
    q, k, v, decay, beta = parts(mixer, x)
    gamma, eta = curvature_gates(mixer, x)
    o, last, a = preconditioned_loop(mixer, q, k, v, decay.exp(), beta, gamma.exp(), eta)
    assert_run(mixer, x, read(mixer, o, x), last, a)


def test_a_squash_of_1_is_kda():
    torch.manual_seed(2)
    mixer, plain = create("precond_kda", dim=32, squash=1.0).double(), create("kda", dim=32, eps=1e-5, gate_bias=True).double()
    plain.load_state_dict({name: t for name, t in mixer.state_dict().items() if not name.startswith("curvature")})
    x = torch.randn(2, 40, 32, dtype=torch.float64)
    assert distance(mixer(x), plain(x)) < 1e-12
