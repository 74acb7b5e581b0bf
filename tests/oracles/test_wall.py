"""Wall attention against fla-core's, and in float64 against its products, pair by pair."""

import math
from functools import partial

import pytest
import torch

from linattn.mixers import CallContext, create
from tests.conformance.checks import states
from tests.oracles import standins
from tests.oracles.compare import assert_graded, assert_pieces, distance


def naive_wall_attn(*tensors, scale):
    """The wheel's function, with the two lines that it imports from its package: base 2, and the sums of gates."""
    naive = standins.module("fla-core==0.6.0", "fla/ops/wall_attn/naive.py", fla__ops__utils__constant="RCP_LN2",
                            fla__ops__utils__cumsum="chunk_global_cumsum")  # fmt: skip
    naive.RCP_LN2 = 1 / math.log(2)
    naive.chunk_global_cumsum = lambda gates, cu_seqlens, scale: scale * gates.cumsum(1)
    return naive.naive_wall_attn(*tensors, scale=scale)


def made(**options):
    """A mixer with effective gates."""
    mixer = create("wall", **options)
    torch.nn.init.normal_(mixer.decay_proj.bias, 1.0)
    return mixer


@pytest.mark.parametrize("piece", [32, 7])  # queries at a time
@torch.no_grad()
def test_fla(piece):
    torch.manual_seed(0)
    mixer, x = made(dim=64), 2 * torch.randn(2, 75, 64)
    mixer.piece = piece
    r = mixer.project(x, CallContext(x))
    wanted = mixer.read(naive_wall_attn(r.q, r.k, r.v, r.decay, scale=0.25), x)
    assert_pieces(mixer, x, wanted, [30, 1, 1, 43])


def products(mixer, x):
    r = mixer.project(x, CallContext(x))
    out = []
    for t in range(x.shape[1]):
        faded, scores = r.q[:, t], []
        for i in range(t, -1, -1):
            scores.insert(0, (faded * r.k[:, i]).sum(-1) * mixer.size**-0.5)
            faded = faded * r.decay[:, i].exp()
        out.append((torch.stack(scores, 1).softmax(1)[..., None] * r.v[:, : t + 1]).sum(1))
    return mixer.read(torch.stack(out, 1), x)


@pytest.mark.parametrize("piece", [32, 5])
def test_pair_by_pair(piece):
    torch.manual_seed(1)
    mixer, x = made(dim=32, heads=2).double(), 2 * torch.randn(2, 18, 32, dtype=torch.float64)
    mixer.piece = piece
    assert_graded(mixer, lambda x: products(mixer, x), x, list(mixer.parameters()))


@torch.no_grad()
def test_open_gates_are_softmax_without_positions():
    mixer, softmax, x = create("wall", dim=64), create("softmax", dim=64, rotated=0), torch.randn(2, 40, 64)
    mixer.decay_proj.bias.fill_(200.0)
    softmax.load_state_dict({name: t for name, t in mixer.state_dict().items() if "decay" not in name})
    assert distance(mixer(x), softmax(x)) < 1e-5


@torch.no_grad()
def test_strong_gates():
    """e^-300 a token is 0 in float32 and leaves only the token itself, without overflow."""
    mixer, x = create("wall", dim=32), torch.randn(1, 70, 32)
    mixer.decay_proj.weight.zero_()
    mixer.decay_proj.bias.fill_(-300.0)
    r = mixer.project(x, CallContext(x))
    own = (r.q * r.k).sum(-1) * mixer.size**-0.5  # [B, T, H]; all other scores are 0
    weight = own.exp() / (own.exp() + torch.arange(70)[:, None])
    before = (r.v.cumsum(1) - r.v) / (own.exp() + torch.arange(70)[:, None])[..., None]
    assert distance(mixer(x), mixer.read(weight[..., None] * r.v + before, x)) < 1e-5


@pytest.mark.parametrize("check", [states.check_resume, states.check_packed, states.check_padding])
def test_states_of_gates_that_fade(check):
    check(partial(made))
