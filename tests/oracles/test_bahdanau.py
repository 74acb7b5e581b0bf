"""Additive attention against espnet's with the same weights, and against the paper's equations as a loop."""

import torch

from linattn import mixing_matrix
from linattn.mixers import create
from tests.oracles import standins
from tests.oracles.compare import distance


def made(hidden=24):
    torch.manual_seed(0)
    mixer = create("bahdanau", dim=16, hidden=hidden).double()
    x, context = torch.randn(3, 5, 16, dtype=torch.float64), torch.randn(3, 9, 16, dtype=torch.float64)
    return mixer, x.requires_grad_(), context.requires_grad_()


def loop(mixer, x, context):
    """Word by word: scores, then the weighted mean of the context."""
    rows, w, u = [], mixer.q_proj.weight, mixer.k_proj
    for states, words in zip(x, context, strict=True):
        for s in states:
            fits = [mixer.score.weight[0] @ torch.tanh(w @ s + u.weight @ h + u.bias) for h in words]
            weights = torch.stack(fits).exp() / torch.stack(fits).exp().sum()
            rows.append(sum(a * h for a, h in zip(weights, words, strict=True)))
    return torch.stack(rows).view_as(x)


def espnet(mixer, x, context, lengths):
    module = standins.module(
        "espnet==202511",
        "espnet/nets/pytorch_backend/rnn/attentions.py",
        espnet__nets__pytorch_backend__nets_utils="make_pad_mask to_device",
    )
    module.to_device = lambda _, t: t
    module.make_pad_mask = lambda lengths: torch.arange(9) >= torch.tensor(lengths)[:, None]
    theirs = module.AttAdd(16, 16, mixer.score.in_features).double()
    weights = {"mlp_enc.weight": mixer.k_proj.weight, "mlp_enc.bias": mixer.k_proj.bias, "mlp_dec.weight": mixer.q_proj.weight}
    theirs.load_state_dict({**weights, "gvec.weight": mixer.score.weight, "gvec.bias": torch.randn(1).double()})  # shifts all scores
    return torch.stack([theirs(context, lengths, s, None, scaling=1.0)[0] for s in x.unbind(1)], 1)


def test_loop():
    mixer, x, context = made()
    y, wanted = mixer(x, context), loop(mixer, x, context)
    assert distance(y, wanted) < 1e-12
    got, expected = (torch.autograd.grad(t.square().sum(), [x, context, *mixer.parameters()]) for t in (y, wanted))
    assert all(distance(a, b) < 1e-11 for a, b in zip(got, expected, strict=True))


def test_wheel():
    mixer, x, context = made()
    mixer.piece = 2
    y = mixer(x, context, context_mask=torch.arange(9) < torch.tensor([9, 4, 7])[:, None])
    wanted = espnet(mixer, x, context, [9, 4, 7])
    assert distance(y, wanted) < 1e-12
    got, expected = (torch.autograd.grad(t.square().sum(), [x, context]) for t in (y, wanted))
    assert all(distance(a, b) < 1e-11 for a, b in zip(got, expected, strict=True))


def test_the_output_is_a_mean_of_the_context():
    mixer, x, context = made()
    matrix = mixing_matrix(mixer, x, context)[:, 0]
    assert distance(matrix.sum(-1), torch.ones(3, 5).double()) < 1e-12 and distance(matrix @ context, mixer(x, context)) < 1e-12
