"""Titans' memory against autograd's gradients of the paper's loss, token by token in float64.

There is no official code. fla-core's titans/naive.py is no oracle: in its gradient of the layer norm the first of three
terms is not divided by the deviation, and test_fla_slips shows that it is no gradient.
"""

import pytest
import torch
import torch.nn.functional as F

from linattn.mixers import CallContext, create
from tests.oracles import wheels
from tests.oracles.compare import distance


def network(maps, x):
    for level, w in enumerate(maps):
        x = (F.silu(x) if level else x) @ w
    return x


@pytest.mark.parametrize("options", [{}, {"depth": 1}, {"depth": 3, "block": 5, "rate": 0.5}, {"block": 1}], ids=str)
def test_autograd_of_the_loss(options):
    torch.manual_seed(0)
    mixer, x = create("titans", dim=32, heads=2, **options).double(), torch.randn(1, 37, 32, dtype=torch.float64)
    torch.nn.init.normal_(mixer.gates_proj.bias)
    q, k, v = mixer.conv(mixer.qkv_proj(x), CallContext(x)).unflatten(-1, (3, 2, -1)).unbind(2)
    q, k = (t / torch.sqrt(t.square().sum(-1, keepdim=True) + 1e-6) for t in (q, k))
    alpha, eta, theta = torch.sigmoid(mixer.gates_proj(x)).unflatten(-1, (3, 2)).detach()[0].unbind(1)
    out = torch.zeros(37, 2, 16, dtype=torch.float64)
    for h in range(2):
        memory, momentum = [w.detach() for w in mixer.memory[:, h]], [torch.zeros(16, 16).double()] * mixer.depth
        for t in range(37):
            if t % mixer.block == 0:
                start = [w.clone().requires_grad_() for w in memory]
            loss = (network(start, k[0, t, h].detach()) - v[0, t, h].detach()).square().sum()
            slopes = torch.autograd.grad(loss, start)
            rate = mixer.rate / mixer.block * theta[t, h] * (1 - eta[t, h])
            momentum = [eta[t, h] * s - rate * g for s, g in zip(momentum, slopes, strict=True)]
            memory = [(1 - alpha[t, h]) * w + s for w, s in zip(memory, momentum, strict=True)]
            out[t, h] = network(memory, q[0, t, h])
    o = F.rms_norm(out, (16,), mixer.norm.weight, 1e-5).flatten(-2)
    wanted = mixer.o_proj(o * F.silu(mixer.g_proj(x[0])))
    assert distance(mixer(x)[0], wanted) < 1e-9
    state, y = None, []
    for piece in x.split([5, 1, 20, 11], 1):
        p, state = mixer(piece, state, return_state=True)
        y.append(p)
    assert distance(torch.cat(y, 1)[0], wanted) < 1e-9


def test_fla_slips():
    """The line of fla's titans_linear for the gradient against autograd; its TTT has the same derivative without the error."""
    text = (wheels.path("fla-core==0.6.0") / "fla/ops/titans/naive.py").read_text(encoding="utf-8")
    assert "v_new = D * grad - grad.sum(-1, keepdim=True) / (rstd * D)" in text
    torch.manual_seed(1)
    z, target = torch.randn(5, 8, dtype=torch.float64, requires_grad=True), torch.randn(5, 8, dtype=torch.float64)
    (wanted,) = torch.autograd.grad((F.layer_norm(z, (8,)) - target).square().sum() / 2, z)
    hat, deviation = F.layer_norm(z, (8,)), torch.sqrt(z.var(-1, unbiased=False, keepdim=True) + 1e-5)
    grad = hat - target
    last = hat * (grad * hat).sum(-1, keepdim=True)
    right = (8 * grad - grad.sum(-1, keepdim=True) - last) / (deviation * 8)
    wrong = 8 * grad - grad.sum(-1, keepdim=True) / (deviation * 8) - last / (deviation * 8)
    assert distance(right, wanted) < 1e-9 and distance(wrong, wanted) > 1
