"""Transformer-XL against the relative attention of transformers' XLNet with the same weights, segment by segment."""

import pytest
import torch
from transformers import XLNetConfig, XLNetModel
from transformers.models.xlnet.modeling_xlnet import XLNetRelativeAttention

from linattn.mixers import create
from tests.oracles.compare import distance

HEADS, DIM = 4, 32


def pair(**options):
    torch.manual_seed(0)
    config = XLNetConfig(d_model=DIM, n_head=HEADS, n_layer=1, d_inner=8, vocab_size=8, dropout=0.0, attn_type="uni")
    theirs = XLNetRelativeAttention(config).double().eval()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    ours = create(options.pop("name", "transformer_xl"), dim=DIM, heads=HEADS, **options).double()
    maps = {f"{name}_proj.weight": getattr(theirs, name).detach().flatten(1) for name in "qkvro"}
    own = {name: t if name[0] == "o" else t.T for name, t in maps.items()}
    own |= {"content_bias": theirs.r_w_bias, "position_bias": theirs.r_r_bias}
    ours.load_state_dict(ours.state_dict() | own)
    return ours, theirs, XLNetModel(config)


def segment(theirs, model, x, memory):
    """Run their attention on one segment [B, L, D] with its memory [B, M, D]; their sinusoids are float32."""
    both, length = torch.cat([memory, x], 1).transpose(0, 1), x.shape[1]
    total = len(both)
    q, k, v = (torch.einsum("ibh,hnd->ibnd", h, w) for h, w in ((x.transpose(0, 1), theirs.q), (both, theirs.k), (both, theirs.v)))
    place = model.relative_positional_encoding(length, total, bsz=x.shape[0]).double()
    future = torch.ones(length, total, dtype=torch.float64).triu(1 + total - length)[..., None, None].expand(-1, -1, x.shape[0], 1)
    o = theirs.rel_attn_core(q, k, v, torch.einsum("ibh,hnd->ibnd", place, theirs.r), attn_mask=future)
    return torch.einsum("ibnd,hnd->ibh", o, theirs.o).transpose(0, 1)


@pytest.mark.parametrize("memory", [0, 3, 8, 20])
def test_segments(memory):
    ours, theirs, model = pair(segment=8, memory=memory)
    x = torch.randn(2, 29, DIM, dtype=torch.float64)
    wanted = [segment(theirs, model, x[:, s : s + 8], x[:, max(0, s - memory) : s]) for s in range(0, 29, 8)]
    assert distance(ours(x), torch.cat(wanted, 1)) < 1e-6  # their sines and cosines are rounded to float32
    state, y = None, []
    for piece in x.split([5, 1, 11, 12], 1):
        o, state = ours(piece, state, return_state=True)
        y.append(o)
    assert distance(torch.cat(y, 1), ours(x)) < 1e-12
    whole, ours.piece = ours(x), 7  # a few queries at a time
    assert distance(ours(x), whole) < 1e-12 and distance(ours(x[:, 20:], ours(x[:, :20], return_state=True)[1]), whole[:, 20:]) < 1e-12


def test_closed_form():
    """The four terms of the paper's equation, pair by pair in float64."""
    torch.manual_seed(1)
    ours, x = create("transformer_xl", dim=8, heads=1, segment=3, memory=2).double(), torch.randn(1, 9, 8, dtype=torch.float64)
    u, w = ours.content_bias[0], ours.position_bias[0]
    rate = 10000 ** (-torch.arange(4, dtype=torch.float64) / 4)
    for t in range(9):
        first = max(0, t // 3 * 3 - 2)
        scores = []
        for i in range(first, t + 1):
            place = ours.r_proj(torch.cat([torch.sin((t - i) * rate), torch.cos((t - i) * rate)]))
            q, k = ours.q_proj(x[0, t]), ours.k_proj(x[0, i])
            scores.append((q @ k + u @ k + q @ place + w @ place) / 8**0.5)
        o = torch.stack(scores).softmax(0) @ ours.v_proj(x[0, first : t + 1])
        assert distance(ours(x)[0, t], ours.o_proj(o)) < 1e-9
