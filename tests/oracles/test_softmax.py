"""Softmax attention against torch's attention under a dense mask, and against transformers' Llama layer with the same weights."""

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding

from linattn.mixers import Carry, create
from tests.oracles.compare import distance


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_dense_mask(kv_heads):
    mixer = create("softmax", dim=32, heads=4, kv_heads=kv_heads).double()
    x = torch.randn(2, 17, 32, dtype=torch.float64)
    r = mixer.project(x, Carry(x))
    k, v = (t.repeat_interleave(4 // kv_heads, 2).transpose(1, 2) for t in (r.k, r.v))
    visible = torch.ones(17, 17, dtype=torch.bool).tril()
    o = F.scaled_dot_product_attention(r.q.transpose(1, 2), k, v, attn_mask=visible)
    assert distance(mixer(x), mixer.o_proj(o.transpose(1, 2).flatten(-2))) < 1e-14


@pytest.mark.parametrize("kv_heads", [2, 4])
def test_llama(kv_heads):
    config = LlamaConfig(hidden_size=32, num_attention_heads=4, num_key_value_heads=kv_heads, num_hidden_layers=1, vocab_size=8)
    config._attn_implementation = "eager"
    theirs = LlamaAttention(config, 0).eval()
    ours = create("softmax", dim=32, heads=4, kv_heads=kv_heads)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 40, 32)
    angles = LlamaRotaryEmbedding(config)(x, torch.arange(40)[None])
    hidden = torch.full((40, 40), float("-inf")).triu(1)[None, None]
    wanted, _ = theirs(x, position_embeddings=angles, attention_mask=hidden)
    assert distance(ours(x), wanted) < 1e-5
