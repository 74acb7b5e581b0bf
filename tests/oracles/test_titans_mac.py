"""Titans with memory as context, segment by segment as section 4.1 of the paper says, in float64."""

import pytest
import torch
import torch.nn.functional as F

from tests.oracles.titans import Learner, attention, check, convolved, make, normal, rms

OPTIONS = [{"segment": 6}, {"segment": 4, "depth": 1, "persistent": 0}, {"segment": 64, "conv_width": 1}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_equations(options):
    mixer, x = make("titans_mac", 21, **options)
    learner, asked, attended, out = Learner(mixer), [], [], []
    outside = [F.silu(mixer.attention_proj(p)).view(3, 2, 16) for p in mixer.persistent]
    for t, token in enumerate(x[0]):
        if t % mixer.block == 0:
            keys, values = [p[1] for p in outside], [p[2] for p in outside]
            learner.start = [list(maps) for maps in learner.maps]
        asked.append(mixer.retrieve_proj(token))
        h = learner.opening(normal(convolved(asked, mixer.retrieve_conv.weight).view(2, 16))).flatten()
        attended.append(mixer.attention_proj(token))
        q, k, v = convolved(attended, mixer.attention_conv.weight).view(3, 2, 16)
        _, h_k, h_v = F.silu(mixer.attention_proj(h)).view(3, 2, 16)
        keys, values = [*keys, h_k, k], [*values, h_v, v]
        y = attention(q, keys, values)
        gate = torch.sigmoid(rms(learner(y.flatten()), mixer.norm.weight))
        gated = (rms(y, mixer.attention_norm.weight) * gate).flatten()
        out.append(mixer.o_proj(gated * F.silu(mixer.g_proj(token))))
    check(mixer, x, torch.stack(out))


def test_the_memory_reaches_over_segments():
    """A segment depends on earlier ones only through the memory."""
    mixer, x = make("titans_mac", 24, segment=8)
    (slope,) = torch.autograd.grad(mixer(x)[0, 20].sum(), x)
    assert (slope[0, :12].norm(dim=-1) > 0).all()
    torch.nn.init.zeros_(mixer.memory)  # empty, and two maps of zeros learn nothing
    (slope,) = torch.autograd.grad(mixer(x)[0, 20].sum(), x)
    assert (slope[0, :12] == 0).all() and (slope[0, 16:21].norm(dim=-1) > 0).all()
