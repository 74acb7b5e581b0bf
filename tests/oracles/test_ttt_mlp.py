"""TTT-MLP against autograd's gradients of the paper's loss, token by token in float64, including gradients through them."""

import pytest
import torch
import torch.nn.functional as F

from linattn.mixers import create
from linattn.mixers.parts import rotate
from tests.oracles.compare import distance

NAMES = ("W1", "b1", "W2", "b2")


def make(seed, heads=2, **options):
    torch.manual_seed(seed)
    mixer = create("ttt_mlp", dim=32, heads=heads, **options).double()
    for p in (mixer.norm_weight, mixer.norm_bias, mixer.rate_proj.weight, *(getattr(mixer, name) for name in NAMES)):
        torch.nn.init.normal_(p, std=0.5)
    torch.nn.init.normal_(mixer.place, std=0.02)
    return mixer


def inner(mixer, h, model, x):
    """f(x) for the model W1, b1, W2, b2 of head h: [K] to [K]."""
    w1, b1, w2, b2 = model
    z = F.gelu(x @ w1 + b1, approximate="tanh") @ w2 + b2
    return x + F.layer_norm(z[0], (mixer.size,), mixer.norm_weight[h], mixer.norm_bias[h], 1e-6)


def loop(mixer, x):
    """[1, T, D] to [T, D]."""
    q, k, v = (p(x).unflatten(-1, (mixer.heads, -1)) for p in (mixer.q_proj, mixer.k_proj, mixer.v_proj))
    rates = 10000.0 ** (-torch.arange(0, mixer.size, 2, dtype=x.dtype) / mixer.size)
    angles = (torch.arange(x.shape[1]) % mixer.batch)[None, :, None] * rates
    q, k = rotate(q, angles, interleaved=True), rotate(k, angles, interleaved=True)
    eta = torch.sigmoid(mixer.rate_proj(x)) / mixer.size
    out = []
    for t in range(x.shape[1]):
        if t == 0:
            models = [[getattr(mixer, name)[h] for name in NAMES] for h in range(mixer.heads)]
        if t % mixer.batch == 0:
            starts, sums = models, [[0.0] * 4 for _ in models]
        factor = 1 / (t % mixer.batch + 1) + mixer.place[t % mixer.batch]
        for h, start in enumerate(starts):
            loss = (inner(mixer, h, start, k[0, t, h]) - v[0, t, h]).square().sum() / 2
            slopes = torch.autograd.grad(loss, start, create_graph=True)
            sums[h] = [s + eta[0, t, h] * g for s, g in zip(sums[h], slopes, strict=True)]
        models = [[p - factor * s for p, s in zip(start, total, strict=True)] for start, total in zip(starts, sums, strict=True)]
        out.append(torch.cat([inner(mixer, h, model, q[0, t, h]) for h, model in enumerate(models)]))
    return mixer.o_proj(mixer.post_norm(torch.stack(out)))


@pytest.mark.parametrize("options", [{}, {"heads": 1, "batch": 5}], ids=str)
def test_autograd_of_the_loss(options):
    mixer, x = make(0, **options), torch.randn(1, 21, 32, dtype=torch.float64, requires_grad=True)
    y, wanted = mixer(x)[0], loop(mixer, x)
    assert distance(y, wanted) < 1e-9
    state, parts = None, []
    for piece in x.split([5, 1, 11, 4], 1):
        o, state = mixer(piece, state, return_state=True)
        parts.append(o)
    assert distance(torch.cat(parts, 1)[0], wanted) < 1e-9
    wrt = [x, *mixer.parameters()]
    ours, theirs = (torch.autograd.grad(o.square().sum(), wrt) for o in (y, wanted))
    assert all(distance(a, b) < 1e-9 for a, b in zip(ours, theirs, strict=True))


def test_weights_of_the_authors():
    """Names and shapes in ttt-lm-pytorch's ttt.py; with them its output was found equal to 1e-7."""
    mixer = make(2)
    theirs = {f"{n}_proj.weight": torch.randn(32, 32) for n in "qkvo"}
    theirs |= {"post_norm.weight": torch.randn(32), "post_norm.bias": torch.randn(32)}
    theirs |= {"learnable_ttt_lr_weight": torch.randn(2, 1, 32), "learnable_ttt_lr_bias": torch.randn(2, 1)}
    theirs |= {"learnable_token_idx": torch.randn(16), "W1": torch.randn(2, 16, 64), "b1": torch.randn(2, 1, 64)}
    theirs |= {"W2": torch.randn(2, 64, 16), "b2": torch.randn(2, 1, 16)}
    theirs |= {"ttt_norm_weight": torch.randn(2, 16), "ttt_norm_bias": torch.randn(2, 16)}
    mixer.load_ttt_lm(theirs)
    for name in NAMES:
        assert torch.equal(getattr(mixer, name), theirs[name].double())
    assert torch.equal(mixer.rate_proj.weight[1], theirs["learnable_ttt_lr_weight"][1, 0].double())
