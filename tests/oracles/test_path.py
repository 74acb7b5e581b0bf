"""PaTH attention against fla-core's blockwise form, and in float64 against reflections carried out one by one."""

import pytest
import torch

from linattn.mixers import Carry, create
from tests.oracles.compare import distance, fla


def pieces(mixer, x, sizes):
    state, y = None, []
    for piece in x.split(sizes, 1):
        o, state = mixer(piece, state, return_state=True)
        y.append(o)
    return torch.cat(y, 1)


@pytest.mark.parametrize("piece", [256, 16])  # queries at a time
@pytest.mark.parametrize("qk_norm", [False, True])
def test_fla(qk_norm, piece):
    torch.manual_seed(0)
    mixer, x = create("path", dim=64, qk_norm=qk_norm), 2 * torch.randn(2, 75, 64)
    mixer.piece = piece
    with torch.no_grad():
        r = mixer.project(x, Carry(x))
        naive = fla("path_attn").naive_path_attn
        o = naive(r.q, r.k, r.v, r.w, r.beta, torch.zeros(2, 75, 4), 16**-0.5, chunk_size=16)
        assert distance(mixer(x), mixer.read(o, x)) < 1e-5
        assert distance(pieces(mixer, x, [30, 1, 1, 43]), mixer.read(o, x)) < 1e-5


def test_reflections_one_by_one():
    torch.manual_seed(1)
    mixer, x = create("path", dim=32, heads=2).double(), torch.randn(1, 14, 32, dtype=torch.float64, requires_grad=True)
    r = mixer.project(x, Carry(x))
    out = []
    for t in range(14):
        scores = []
        for i in range(t + 1):
            k = r.k[:, i]
            for s in range(i + 1, t + 1):
                w = r.w[:, s]
                k = k - r.beta[:, s, :, None] * w * (w * k).sum(-1, keepdim=True)
            scores.append((r.q[:, t] * k).sum(-1) / 4)
        out.append((torch.stack(scores, 1).softmax(1)[..., None] * r.v[:, : t + 1]).sum(1))
    wanted = mixer.read(torch.stack(out, 1), x)
    assert distance(mixer(x), wanted) < 1e-9
    wrt = [x, *mixer.parameters()]
    ours, theirs = (torch.autograd.grad(y.square().sum(), wrt) for y in (mixer(x), wanted))
    assert all(distance(a, b) < 1e-9 for a, b in zip(ours, theirs, strict=True))
