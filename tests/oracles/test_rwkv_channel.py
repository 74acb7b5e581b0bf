"""RWKV's channel mixing against transformers' RWKV-4 and the authors' versions 6 and 7, with the same weights."""

import torch
from transformers import RwkvConfig
from transformers.models.rwkv.modeling_rwkv import RwkvFeedForward

from linattn.hf.convert.rwkv import CHANNEL
from linattn.mixers import create
from tests.oracles.compare import distance, take
from tests.oracles.rwkv import NONE, norm, package, scattered


def test_version_4():
    theirs = RwkvFeedForward(RwkvConfig(hidden_size=32, num_hidden_layers=1))
    torch.nn.init.uniform_(theirs.time_mix_key)
    torch.nn.init.uniform_(theirs.time_mix_receptance)
    ours, x = create("rwkv_channel", dim=32), torch.randn(2, 20, 32)
    take(ours, theirs.state_dict(), CHANNEL)
    assert distance(ours(x), theirs(x)[0]) < 1e-5


def test_version_6():
    m, x, zeros = scattered(create("rwkv_channel", dim=32, hidden=112)), torch.randn(20, 32), torch.zeros(32)
    matrices = [p.weight.T for p in (m.k_proj, m.o_proj, m.r_proj)]
    mixes = 1 - m.time_mix_key, 1 - m.time_mix_receptance
    y, last = package().RWKV.ffn_seq_v6(None, x, zeros, torch.ones(32), zeros, *mixes, *matrices, *3 * NONE)
    ours, state = m(norm(x)[None], return_state=True)
    assert distance(ours[0], y - x) < 1e-5
    assert distance(state["last"][0, 0], last) < 1e-5


def test_version_7():
    m, x = scattered(create("rwkv_channel", dim=32, gated=False)), torch.randn(20, 32)
    y, _ = package(seven=True).RWKV_x070_CMix_seq(x, torch.zeros(32), 1 - m.time_mix_key, m.k_proj.weight.T, m.o_proj.weight.T)
    assert distance(m(x[None])[0], y) < 1e-5
