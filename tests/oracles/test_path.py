"""PaTH attention and PaTH-FoX against fla-core's blockwise form, and in float64 against explicit reflections."""

from functools import partial

import pytest
import torch

from linattn.mixers import CallContext, create
from tests.conformance.checks import states
from tests.oracles.compare import distance, fla


def pieces(mixer, x, sizes):
    state, y = None, []
    for piece in x.split(sizes, 1):
        o, state = mixer(piece, state, return_state=True)
        y.append(o)
    return torch.cat(y, 1)


@pytest.mark.parametrize("piece", [256, 16])  # queries at a time
@pytest.mark.parametrize("options", [{}, {"qk_norm": True}, {"forget": True}], ids=str)
def test_fla(options, piece):
    torch.manual_seed(0)
    mixer, x = create("path", dim=64, **options), 2 * torch.randn(2, 75, 64)
    mixer.piece = piece
    with torch.no_grad():
        r = mixer.project(x, CallContext(x))
        naive = fla("path_attn").naive_path_attn
        gates = torch.zeros(2, 75, 4) if r.decay is None else r.decay
        o = naive(r.q, r.k, r.v, r.w, r.beta, gates, 16**-0.5, chunk_size=16)
        assert distance(mixer(x), mixer.read(o, x)) < 1e-5
        assert distance(pieces(mixer, x, [30, 1, 1, 43]), mixer.read(o, x)) < 1e-5


@pytest.mark.parametrize("forget", [False, True])
def test_reflections_one_by_one(forget):
    torch.manual_seed(1)
    mixer, x = create("path", dim=32, heads=2, forget=forget).double(), torch.randn(1, 14, 32, dtype=torch.float64, requires_grad=True)
    r = mixer.project(x, CallContext(x))
    out = []
    for t in range(14):
        scores = []
        for i in range(t + 1):
            k = r.k[:, i]
            for s in range(i + 1, t + 1):
                w = r.w[:, s]
                k = k - r.beta[:, s, :, None] * w * (w * k).sum(-1, keepdim=True)
            fade = r.decay[:, i + 1 : t + 1].sum(1) if forget else 0.0
            scores.append(((r.q[:, t] * k).sum(-1) + fade) / 4)
        out.append((torch.stack(scores, 1).softmax(1)[..., None] * r.v[:, : t + 1]).sum(1))
    wanted = mixer.read(torch.stack(out, 1), x)
    assert distance(mixer(x), wanted) < 1e-9
    wrt = [x, *mixer.parameters()]
    ours, theirs = (torch.autograd.grad(y.square().sum(), wrt) for y in (mixer(x), wanted))
    assert all(distance(a, b) < 1e-9 for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("check", [states.check_resume, states.check_packed, states.check_padding, states.check_saved])
def test_states_of_path_fox(check):
    check(partial(create, "path", forget=True))
