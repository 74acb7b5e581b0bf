"""The plain feed-forwards against those of transformers' models with the same weights."""

import pytest
import torch
from transformers.models.gemma import modeling_gemma
from transformers.models.llama import modeling_llama
from transformers.models.vit import modeling_vit

from linattn import ffn
from tests.oracles.compare import distance

SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}


@pytest.mark.parametrize(
    ("name", "options", "theirs"),
    [
        ("swiglu", {}, lambda: modeling_llama.LlamaMLP(modeling_llama.LlamaConfig(**SIZES))),
        ("geglu", {}, lambda: modeling_gemma.GemmaMLP(modeling_gemma.GemmaConfig(**SIZES))),
        ("mlp", {}, lambda: modeling_vit.ViTMLP(modeling_vit.ViTConfig(**SIZES))),
        ("mlp", {"activation": "relu"}, lambda: modeling_vit.ViTMLP(modeling_vit.ViTConfig(**SIZES, hidden_act="relu"))),
    ],
)
def test_transformers(name, options, theirs):
    torch.manual_seed(0)
    ours, other = ffn.create(name, 16, 24, **options).double(), theirs().double()
    other.load_state_dict(ours.state_dict())
    x = torch.randn(2, 5, 16, dtype=torch.float64, requires_grad=True)
    runs = [[y := m(x), *torch.autograd.grad(y.square().sum(), [x, *dict(sorted(m.named_parameters())).values()])] for m in (ours, other)]
    for a, b in zip(*runs, strict=True):
        assert distance(a, b) < 1e-12
