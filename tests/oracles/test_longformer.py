"""Longformer against transformers' layer with the same weights, and, for dilation and the causal model, against loops."""

import pytest
import torch

from linattn.mixers import create
from tests.oracles.compare import distance
from tests.oracles.patterns import assert_pattern, drawn

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize("count", [0, 1, 3])
def test_transformers(count):
    from transformers.models.longformer.modeling_longformer import LongformerConfig, LongformerSelfAttention

    window, length = 4, 40
    config = LongformerConfig(hidden_size=32, num_attention_heads=4, attention_window=[2 * window], attention_probs_dropout_prob=0.0)
    theirs = LongformerSelfAttention(config, 0).double().eval()
    ours = create("longformer", dim=32, window=window, global_tokens=count, causal=False, rotary=False).double()
    names = {"query": "q_proj", "key": "k_proj", "value": "v_proj"}
    if count:
        names |= {"query_global": "q_global", "key_global": "k_global", "value_global": "v_global"}
    weights = theirs.state_dict()
    found = {f"{b}.{t}": weights[f"{a}.{t}"] for a, b in names.items() for t in ("weight", "bias")}
    found |= {"o_proj.weight": torch.eye(32, dtype=torch.float64), "o_proj.bias": torch.zeros(32, dtype=torch.float64)}
    ours.load_state_dict(found)
    x = torch.randn(2, length, 32, dtype=torch.float64)
    mask = torch.zeros(2, length, dtype=torch.float64)
    mask[1, 29:] = -1
    mask[:, :count] = 1
    wanted = theirs(
        x, attention_mask=torch.where(mask < 0, -10000.0, torch.where(mask > 0, 10000.0, 0.0)), is_index_masked=mask < 0,
        is_index_global_attn=mask > 0, is_global_attn=count > 0,
    )[0]  # fmt: skip
    real = mask >= 0
    assert distance(ours(x, mask=real)[real], wanted[real]) < 1e-6  # theirs computes its softmax in float32


@pytest.mark.parametrize("length", [1, 6, 30])
@pytest.mark.parametrize("causal", [True, False])
def test_gaps(length, causal):
    """Dilated windows, which transformers lacks."""
    window, dilations = 2, (1, 3)
    ours = create("longformer", dim=32, window=window, dilations=dilations, global_tokens=0, causal=causal).double()

    def mask(gap):
        return drawn(length, lambda i, j: (i - j) % gap == 0 and abs(i - j) <= window * gap and (j <= i or not causal))

    masks = torch.stack([mask(gap) for gap in dilations for _ in range(2)])
    assert_pattern(ours, torch.randn(2, length, 32, dtype=torch.float64), masks)


def test_refusals():
    with pytest.raises(ValueError, match="global_tokens must be at least 0, and 0 if causal"):
        create("longformer", dim=32, global_tokens=1)
