"""Gated DeltaNet-2 against fla-core's recurrence, in float64 against the paper's token by token, and against KDA, which it contains."""

import pytest
import torch
import torch.nn.functional as F

from linattn.mixers import CallContext, create
from tests.oracles.compare import distance, fla


def gates(mixer, x):
    """Arguments of fla's recurrence: q, k of unit length and v behind convolutions, the decay's logarithm, b and w, [B, T, H, ...]."""
    q, k, v = mixer.conv(mixer.qkv_proj(x), CallContext(x)).unflatten(-1, (3, mixer.heads, mixer.size)).unbind(2)
    q, k = (t * (t.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for t in (q, k))
    low, high = mixer.decay_proj
    rate = F.softplus((x @ low.weight.T @ high.weight.T).unflatten(-1, (mixer.heads, -1)) + mixer.dt_bias)
    b, w = (torch.sigmoid(x @ p.weight.T).unflatten(-1, (mixer.heads, -1)) for p in (mixer.b_proj, mixer.w_proj))
    return q, k, v, -mixer.A_log.exp()[:, None] * rate, mixer.largest_beta * b, w


def read(mixer, o, x):
    low, high = mixer.g_proj
    gate = torch.sigmoid(x @ low.weight.T @ high.weight.T + high.bias)
    return (F.rms_norm(o, o.shape[-1:], mixer.norm.weight, 1e-5).flatten(2) * gate) @ mixer.o_proj.weight.T


def loop(q, k, v, g, b, w):
    """Decay, read with b k, subtract from the gated value, write along k."""
    s, outputs = k.new_zeros(*k.shape[:1], *k.shape[2:], v.shape[-1]), []
    for t in range(k.shape[1]):
        s = g[:, t, ..., None].exp() * s
        erased = torch.einsum("bhk,bhkv->bhv", b[:, t] * k[:, t], s)
        s = s + torch.einsum("bhk,bhv->bhkv", k[:, t], w[:, t] * v[:, t] - erased)
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], s) * q.shape[-1] ** -0.5)
    return torch.stack(outputs, 1), s


@pytest.mark.parametrize("negative", [False, True])
def test_fla(negative):
    mixer, x = create("gated_deltanet2", dim=64, negative_eigenvalues=negative), 2 * torch.randn(2, 75, 64)
    with torch.no_grad():
        o, s = fla("gdn2").naive_recurrent_gdn2(*gates(mixer, x), output_final_state=True)
        y, state = mixer(x, return_state=True)
        assert distance(y, read(mixer, o, x)) < 1e-5
        assert distance(state["S"], s) < 1e-5


@pytest.mark.parametrize(("heads", "size", "negative"), [(4, None, False), (2, 5, True)])
def test_values_states_and_gradients(heads, size, negative):
    torch.manual_seed(0)
    mixer = create("gated_deltanet2", dim=32, heads=heads, size=size, negative_eigenvalues=negative).double()
    torch.nn.init.normal_(mixer.norm.weight)
    x = 2 * torch.randn(2, 70, 32, dtype=torch.float64, requires_grad=True)
    y, state = mixer(x, return_state=True)
    o, last = loop(*gates(mixer, x))
    wanted = read(mixer, o, x)
    assert distance(y, wanted) < 1e-12
    assert distance(state["S"], last) < 1e-12
    ours, theirs = (torch.autograd.grad(o.pow(3).sum(), (x, *mixer.parameters())) for o in (y, wanted))
    assert all(distance(a, b) < 1e-10 for a, b in zip(ours, theirs, strict=True))


def test_equal_gates_are_kda():
    """With the same β in every channel of b and of w it is KDA."""
    torch.manual_seed(1)
    mixer, kda = (
        create(name, dim=32, gate_bias=True, eps=1e-5) if name == "kda" else create(name, dim=32) for name in ("gated_deltanet2", "kda")
    )
    mixer, kda = mixer.double(), kda.double()
    weights = {name: t for name, t in mixer.state_dict().items() if name != "w_proj.weight"}
    kda.load_state_dict(weights | {"b_proj.weight": kda.b_proj.weight})
    with torch.no_grad():
        for gate in (mixer.b_proj, mixer.w_proj):
            gate.weight.copy_(kda.b_proj.weight.repeat_interleave(mixer.size, 0))
        x = torch.randn(2, 40, 32, dtype=torch.float64)
        assert distance(mixer(x), kda(x)) < 1e-12
