"""The mixture of experts against transformers' Mixtral with the same weights; tests/ffn compares with every expert on every token."""

import torch
from transformers.models.mixtral import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

from linattn import ffn
from tests.oracles.compare import distance


def test_transformers():
    torch.manual_seed(0)
    ours = ffn.create("experts", 16, 24, count=5, active=2)
    theirs = MixtralSparseMoeBlock(MixtralConfig(hidden_size=16, intermediate_size=24, num_local_experts=5, num_experts_per_tok=2))
    theirs.load_state_dict({
        "gate.weight": ours.router.weight, "experts.gate_up_proj": torch.cat([ours.gate_proj, ours.up_proj], 1),
        "experts.down_proj": ours.down_proj,
    })  # fmt: skip
    x = torch.randn(3, 21, 16)
    inputs = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, wanted = ours(inputs[0]), theirs(inputs[1])
    assert distance(y, wanted) < 1e-6
    leaves = ([inputs[0], ours.router.weight, ours.down_proj], [inputs[1], theirs.gate.weight, theirs.experts.down_proj])
    for a, b in zip(*(torch.autograd.grad(t.square().sum(), own) for t, own in zip((y, wanted), leaves, strict=True)), strict=True):
        assert distance(a, b) < 1e-5
