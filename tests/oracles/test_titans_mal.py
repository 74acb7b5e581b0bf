"""Titans with memory as a layer, token by token as section 4.3 of the paper says, in float64."""

import pytest
import torch
import torch.nn.functional as F

from tests.oracles.titans import Learner, attention, check, convolved, make, rms

OPTIONS = [{"window": 5, "block": 4}, {"window": 2, "persistent": 0, "depth": 1}, {"persistent": 7, "block": 3}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_equations(options):
    mixer, x = make("titans_mal", 21, **options)
    learner, window, projected, pairs, out = Learner(mixer), mixer.window, [], [], []
    for t, token in enumerate([*mixer.persistent, *x[0]]):
        if t == len(mixer.persistent):
            learner.end_block()
        y = rms(learner(token), mixer.norm.weight).flatten()
        projected.append(window.qkv_proj(mixer.o_proj(y * F.silu(mixer.g_proj(token)))))
        q, *pair = convolved(projected, window.conv.weight).view(3, 2, 16)
        pairs = [*pairs, pair][-window.size :]
        out.append(mixer.out_proj(attention(q, *zip(*pairs, strict=True)).flatten()))
    check(mixer, x, torch.stack(out[len(mixer.persistent) :]))
