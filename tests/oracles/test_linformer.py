"""Linformer against linformer's layer with the same weights, values and gradients."""

import pytest
import torch

from linattn.mixers import create
from tests.oracles import standins
from tests.oracles.compare import assert_graded


@pytest.mark.parametrize("length", [1, 7, 20])
@pytest.mark.parametrize("shared", [False, True])
def test_wheel(length, shared):
    module = standins.module("linformer==0.2.3", "linformer/linformer.py", linformer__reversible="ReversibleSequence SequentialSequence")
    theirs = module.LinformerSelfAttention(32, 20, k=5, heads=4, share_kv=shared).double()
    ours = create("linformer", dim=32, slots=5, length=20, shared=shared).double()
    with torch.no_grad():
        theirs.to_out.bias.zero_()  # ours has none
        if shared:  # theirs then shares the whole value, ours only the projection
            ours.v_proj.weight.copy_(theirs.to_k.weight)
    names = {"q_proj": "to_q", "k_proj": "to_k", "v_proj": "to_v", "o_proj": "to_out"}
    for a, b in names.items():
        if hasattr(theirs, b):
            getattr(ours, a).weight = getattr(theirs, b).weight
    ours.proj_k = theirs.proj_k
    ours.proj_v = None if shared else theirs.proj_v
    x = torch.randn(2, length, 32, dtype=torch.float64)
    weights = [theirs.to_q.weight, theirs.to_out.weight, theirs.proj_k] + ([] if shared else [theirs.to_k.weight, theirs.proj_v])
    assert_graded(ours, theirs, x, weights)


def test_refusals():
    with pytest.raises(ValueError, match="linformer takes at most length=20 tokens, but 21 came"):
        create("linformer", dim=32, length=20)(torch.zeros(1, 21, 32))
    with pytest.raises(ValueError, match="slots must be at least 1, but came as 0"):
        create("linformer", dim=32, slots=0)
