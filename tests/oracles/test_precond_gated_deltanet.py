"""Preconditioned Gated DeltaNet against fla-core's recurrence, and in float64 against the paper's token by token."""

import pytest
import torch
import torch.nn.functional as F

from linattn.mixers import CallContext, create
from tests.oracles.compare import distance, fla


def curvature_gates(mixer, x):
    """γ's logarithm and η, [B, T, H]."""
    rate = F.softplus(x @ mixer.curvature_a_proj.weight.T + mixer.curvature_dt_bias)
    return -mixer.curvature_A_log.exp() * rate, torch.sigmoid(x @ mixer.curvature_b_proj.weight.T)


def preconditioned_loop(mixer, q, k, v, alpha, beta, gamma, eta):
    """q and k of unit length and v [B, T, H, ...], α [B, T, H, 1 or K], β, γ and η [B, T, H]: outputs, state and curvature."""
    s, a, outputs = k.new_zeros(*k.shape[:1], *k.shape[2:], v.shape[-1]), torch.zeros_like(k[:, 0]), []
    center = mixer.curvature_center.repeat_interleave(k.shape[2] // len(mixer.curvature_center))[:, None]
    for t in range(k.shape[1]):
        a = gamma[:, t, :, None] * a + eta[:, t, :, None] * k[:, t] ** 2
        r = torch.log(a + 1e-6) - center
        p = k[:, t] * mixer.squash ** (-r / (1 + r.abs()))
        s = alpha[:, t, :, :, None] * s
        new = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], s))
        s = s + p[..., None] * new[:, :, None]
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], s) * q.shape[-1] ** -0.5)
    return torch.stack(outputs, 1), s, a


def unit(t):
    return t * (t.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def parts(mixer, x):
    """q, k and v behind convolutions, [B, T, H, ...], α's logarithm and β, [B, T, Hv]."""
    q, k, v = mixer.conv(mixer.qkv_proj(x), CallContext(x)).split((mixer.keys, mixer.keys, mixer.values), -1)
    q, k = (unit(t.unflatten(-1, (mixer.heads, -1))) for t in (q, k))
    decay = -mixer.A_log.exp() * F.softplus(x @ mixer.a_proj.weight.T + mixer.dt_bias)
    return q, k, v.unflatten(-1, (mixer.value_heads, -1)), decay, mixer.largest_beta * torch.sigmoid(x @ mixer.b_proj.weight.T)


def read(mixer, o, x):
    gate = F.silu(x @ mixer.g_proj.weight.T).view_as(o)
    return (F.rms_norm(o, o.shape[-1:], mixer.norm.weight, 1e-5) * gate).flatten(2) @ mixer.o_proj.weight.T


def example(name, **options):
    """A mixer in float64 with no weight at a special value, and tokens."""
    torch.manual_seed(1)
    mixer = create(name, dim=32, **options).double()
    for weight in (mixer.norm.weight, mixer.curvature_center):
        torch.nn.init.normal_(weight)
    return mixer, 2 * torch.randn(2, 70, 32, dtype=torch.float64, requires_grad=True)


def assert_run(mixer, x, wanted, last, curvature):
    """Outputs, states and gradients of ``mixer``."""
    y, state = mixer(x, return_state=True)
    assert distance(y, wanted) < 1e-12
    assert distance(state["S"], last) < 1e-12 and distance(state["curvature"], curvature.flatten(1)) < 1e-12
    ours, theirs = (torch.autograd.grad(o.pow(3).sum(), (x, *mixer.parameters())) for o in (y, wanted))
    assert all(distance(a, b) < 1e-10 for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(("value_heads", "squash"), [(8, 1.5), (4, 2.0)])
def test_fla(value_heads, squash):
    torch.manual_seed(0)
    mixer = create("precond_gated_deltanet", dim=64, value_heads=value_heads, squash=squash)
    torch.nn.init.normal_(mixer.curvature_center)
    x = 2 * torch.randn(2, 75, 64)
    with torch.no_grad():
        q, k, v, decay, beta = parts(mixer, x)
        gamma, eta = curvature_gates(mixer, x)
        o, s, a = fla("precond_gated_delta_rule").naive_recurrent_precond_gated_delta_rule(
            q=q, k=k, v=v, g=decay, beta=beta, g_atk=gamma, beta_atk=eta, output_final_state=True, x=squash,
            log_atk_scale=mixer.curvature_center,
        )  # fmt: skip
        y, state = mixer(x, return_state=True)
        assert distance(y, read(mixer, o, x)) < 1e-5
        assert distance(state["S"], s) < 1e-5
        assert distance(state["curvature"], a.flatten(1)) < 1e-5


@pytest.mark.parametrize("options", [{}, {"heads": 2, "value_heads": 2, "key_size": 5, "value_size": 7, "squash": 2.0}])
def test_values_states_and_gradients(options):
    mixer, x = example("precond_gated_deltanet", **options)
    q, k, v, decay, beta = parts(mixer, x)
    gamma, eta = curvature_gates(mixer, x)
    q, k, gamma, eta = (t.repeat_interleave(mixer.value_heads // mixer.heads, 2) for t in (q, k, gamma.exp(), eta))
    o, last, a = preconditioned_loop(mixer, q, k, v, decay.exp()[..., None], beta, gamma, eta)
    assert_run(mixer, x, read(mixer, o, x), last, a[:, :: mixer.value_heads // mixer.heads])


def test_a_squash_of_1_is_gated_deltanet():
    torch.manual_seed(2)
    mixer, plain = create("precond_gated_deltanet", dim=32, squash=1.0).double(), create("gated_deltanet", dim=32, eps=1e-5).double()
    plain.load_state_dict({name: t for name, t in mixer.state_dict().items() if not name.startswith("curvature")})
    x = torch.randn(2, 40, 32, dtype=torch.float64)
    assert distance(mixer(x), plain(x)) < 1e-12


@torch.no_grad()
def test_a_repeated_token_does_not_make_the_state_grow():
    """With β up to 2 and written keys 1.5 times as long, a token's direction would be multiplied by -2 each time."""
    torch.manual_seed(3)
    mixer = create("precond_gated_deltanet", dim=32, negative_eigenvalues=True, squash=2.0).double()
    mixer.A_log.fill_(-30.0)  # nothing fades
    mixer.curvature_b_proj.weight.zero_()
    mixer.curvature_center.fill_(10.0)
    mixer.b_proj.weight.mul_(1000)
    _, state = mixer(torch.randn(1, 1, 32, dtype=torch.float64).expand(-1, 500, -1), return_state=True)
    assert state["S"].abs().max() < 1e3


def test_bad_options_are_refused():
    for squash in (0.9, 2.5):
        with pytest.raises(ValueError, match=f"squash must be at least 1 and at most 2, but came as {squash}"):
            create("precond_gated_deltanet", dim=32, squash=squash)
