"""RWKV-4 against transformers: one layer's time mixing, and a whole model of both its parts, with the same weights."""

import pytest
import torch
from transformers import RwkvConfig, RwkvModel

from linattn.hf.convert.rwkv import CHANNEL, TIME
from linattn.mixers import create
from linattn.models import LMConfig
from linattn.models.language import LanguageModel
from tests.oracles.compare import distance, take


def model():
    torch.manual_seed(0)
    config = RwkvConfig(vocab_size=50, hidden_size=32, num_hidden_layers=2, context_length=128, rescale_every=0)
    theirs = RwkvModel(config).eval()
    with torch.no_grad():
        for name, p in theirs.named_parameters():
            p.add_(0.3 * torch.randn_like(p)) if p.ndim == 1 or "time_" in name else p.normal_(std=0.3)
    return theirs


def pair():
    theirs, ours = model().blocks[0].attention, create("rwkv4", dim=32)
    take(ours, theirs.state_dict(), TIME)
    return ours, theirs


@pytest.mark.parametrize("tokens", [1, 75])
def test_values_and_gradients(tokens):
    ours, theirs = pair()
    x = torch.randn(2, tokens, 32, requires_grad=True)
    y, (wanted, _) = ours(x), theirs(x)
    assert distance(y, wanted) < 1e-5
    names = ["time_first", "time_decay"] if tokens > 1 else []  # one token's mean is its value
    gradients = [torch.autograd.grad(o.square().sum(), [x, *map(m.get_parameter, names)]) for o, m in ((y, ours), (wanted, theirs))]
    for name, mine, their in zip(("x", *names), *gradients, strict=True):
        assert distance(mine, their) < 1e-5, name


def test_large_keys():
    """Keys whose exponentials overflow float32 without the running maximum."""
    ours, theirs = pair()
    x = 60 * torch.randn(2, 75, 32)
    assert ours.k_proj(x).max() > 100
    y = ours(x)
    assert y.isfinite().all() and distance(y, theirs(x)[0]) < 1e-5


def test_a_model():
    """Blocks of time mixing and channel mixing, prefill and steps, against the model with its states.

    One row: a step of transformers adds the shifted token [B, D] to [B, 1, D], which mixes the rows of a batch.
    """
    theirs = model()
    config = LMConfig(vocab_size=50, dim=32, layers=4, mixer="rwkv4, rwkv_channel", ffn="none", norm="layer", embedding_norm=True)
    ours = LanguageModel(config).model.eval()
    ours.embedding.load_state_dict(theirs.embeddings.state_dict())
    ours.embedding_norm.load_state_dict(theirs.blocks[0].pre_ln.state_dict())
    ours.norm.load_state_dict(theirs.ln_out.state_dict())
    for i, block in enumerate(theirs.blocks):
        parts = (2 * i, block.ln1, block.attention, TIME), (2 * i + 1, block.ln2, block.feed_forward, CHANNEL)
        for layer, norm, part, lines in parts:
            take(ours.layers[layer].mixer, part.state_dict(), lines)
            ours.layers[layer].mixer_norm.load_state_dict(norm.state_dict())
    ids = torch.randint(50, (1, 24))
    with torch.no_grad():
        wanted, theirs_state, state, y, steps = theirs(ids).last_hidden_state, None, None, [], []
        for piece in ids.split([19, 1, 1, 1, 1, 1], 1):
            o, state = ours(piece, state, return_state=True)
            y.append(o)
            out = theirs(piece, state=theirs_state, use_cache=True)
            theirs_state = out.state
            steps.append(out.last_hidden_state)
        assert distance(ours(ids)[0], wanted) < 1e-5
        assert distance(torch.cat(y, 1), wanted) < 1e-5
        assert distance(torch.cat(y, 1), torch.cat(steps, 1)) < 1e-5


def test_the_sum_itself():
    """In float64 against the paper's fraction, written out."""
    ours = pair()[0].double()
    x = torch.randn(1, 40, 32, dtype=torch.float64)
    before = torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)
    mixed = [m * x + (1 - m) * before for m in (ours.time_mix_key, ours.time_mix_value, ours.time_mix_receptance)]
    k, v, r = (p(t)[0] for p, t in zip((ours.k_proj, ours.v_proj, ours.r_proj), mixed, strict=True))
    w, outputs = ours.time_decay.exp(), []
    for t in range(40):
        ages = torch.arange(t - 1, -1, -1, dtype=torch.float64)[:, None]
        weights = torch.cat([torch.exp(-ages * w + k[:t]), torch.exp(ours.time_first + k[t])[None]])
        outputs.append((weights * v[: t + 1]).sum(0) / weights.sum(0))
    assert distance(ours(x)[0], ours.o_proj(torch.sigmoid(r) * torch.stack(outputs))) < 1e-9


def test_layers_start_as_theirs():
    config = RwkvConfig(vocab_size=50, hidden_size=32, num_hidden_layers=3, attention_hidden_size=32)
    ours = LanguageModel(LMConfig(vocab_size=50, dim=32, layers=6, mixer="rwkv4, rwkv_channel", ffn="none")).model.layers
    for i, theirs in enumerate(RwkvModel(config).blocks):
        for mine, their, lines in ((ours[2 * i].mixer, theirs.attention, TIME), (ours[2 * i + 1].mixer, theirs.feed_forward, CHANNEL)):
            wanted, own = their.state_dict(), mine.state_dict()
            # except time_first, which theirs fills by ones_like instead of its intended start
            for name in (n for line in lines for n in line.theirs if n.startswith(("time_mix", "time_decay"))):
                assert distance(own[name], wanted[name].flatten()) < 1e-6, (i, name)


def test_a_row_of_padding_alone_keeps_an_empty_state():
    """Otherwise its sums would count padding, at a weight that no later token reveals."""
    ours, x = create("rwkv4", dim=8), torch.randn(2, 5, 8)
    _, state = ours(x, mask=torch.tensor([[True] * 5, [False] * 5]), return_state=True)
    _, empty = ours(x[1:, :0], return_state=True)
    for name, value in empty.items():
        assert torch.equal(state[name][1:], value), name
