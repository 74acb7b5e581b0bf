"""Titans with memory as a gate, token by token as section 4.2 of the paper says, in float64."""

import pytest
import torch
import torch.nn.functional as F

from tests.oracles.titans import Learner, attention, check, convolved, make, rms

OPTIONS = [{"window": 5, "block": 4}, {"window": 2, "persistent": 0, "depth": 1}, {"persistent": 7, "block": 3}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_equations(options):
    mixer, x = make("titans_mag", 21, **options)
    learner, window, projected, always, seen, out = Learner(mixer), mixer.window, [], [], [], []

    def attended(token):
        projected.append(window.qkv_proj(token))
        return convolved(projected, window.conv.weight).view(3, 2, 16)

    for token in mixer.persistent:
        learner(token)
        always.append(attended(token)[1:])
    learner.end_block()
    for token in x[0]:
        q, *pair = attended(token)
        seen = [*seen, pair][-window.size :]
        y = attention(q, *zip(*always, *seen, strict=True))
        gate = torch.sigmoid(rms(learner(token), mixer.norm.weight))
        gated = (rms(y, mixer.attention_norm.weight) * gate).flatten()
        out.append(mixer.o_proj(gated * F.silu(mixer.g_proj(token))))
    check(mixer, x, torch.stack(out))
