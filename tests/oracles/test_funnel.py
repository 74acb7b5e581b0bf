"""The Funnel's layer that pools against transformers' encoder of one block more, with the same weights; upsampling against theirs."""

import pytest
import torch
from torch import nn

from linattn.mixers import create
from linattn.mixers.memory.funnel import upsampled
from tests.oracles.compare import assert_graded
from tests.oracles.images import shaken

pytest.importorskip("transformers")


def theirs(depth, attention_type, separate_cls):
    """Their positions, pooling and attention for the first layer of block ``depth``, and its weights."""
    from transformers import FunnelConfig
    from transformers.models.funnel.modeling_funnel import FunnelAttentionStructure, FunnelRelMultiheadAttention

    config = FunnelConfig(
        d_model=32, n_head=4, d_head=8, block_sizes=[1] * (depth + 1), attention_type=attention_type, separate_cls=separate_cls,
        hidden_dropout=0.0, attention_dropout=0.0,
    )  # fmt: skip
    structure, layer = FunnelAttentionStructure(config), FunnelRelMultiheadAttention(config, depth)
    with torch.no_grad():
        for p in layer.double().parameters():
            p.add_(0.3 * torch.randn_like(p))

    def call(x, mask):
        """Input x of block ``depth``, for 2^(depth - 1) times as many tokens in the first."""
        length = x.shape[1] * 2 ** (depth - 1)
        inputs = structure.init_attention_inputs(x.new_zeros(x.shape[0], length, 32), attention_mask=x.new_ones(x.shape[0], length))
        for _ in range(depth - 1):
            _, inputs = structure.pre_attention_pooling(x.new_zeros(x.shape[0], 2, 32), inputs)
            inputs = structure.post_attention_pooling(inputs)
        inputs = (*inputs[:2], mask, inputs[3])
        pooled, inputs = structure.pre_attention_pooling(x, inputs)
        return layer(pooled, x, x, inputs)[0]

    return call, layer


def lend(ours, layer):
    """Copy their weights into ours."""
    for a, b in (("q_proj", "q_head"), ("k_proj", "k_head"), ("v_proj", "v_head"), ("o_proj", "post_proj"), ("norm", "layer_norm")):
        setattr(ours, a, getattr(layer, b))
    ours.content_bias, ours.position_bias = layer.r_w_bias, layer.r_r_bias
    ours.r_proj.weight = nn.Parameter(layer.r_kernel.detach().flatten(1).T.contiguous())


@pytest.mark.parametrize("attention_type", ["relative_shift", "factorized"])
@pytest.mark.parametrize("separate_cls", [True, False])
@pytest.mark.parametrize(("depth", "length"), [(1, 12), (1, 7), (2, 8)])
def test_transformers(attention_type, separate_cls, depth, length):
    call, layer = theirs(depth, attention_type, separate_cls)
    ours = create("funnel", dim=32, separate_cls=separate_cls, spacing=2 ** (depth - 1)).double()
    lend(ours, layer)
    x, mask = torch.randn(2, length, 32, dtype=torch.float64), torch.ones(2, length, dtype=torch.float64)
    weights = [p for n, p in layer.named_parameters() if n not in ("r_kernel", "r_s_bias", "seg_embed")]
    assert_graded(lambda x: ours(x)[0], lambda x: call(x, mask), x, weights, 1e-6)  # theirs computes its softmax in float32


@pytest.mark.parametrize("separate_cls", [True, False])
@pytest.mark.parametrize("length", [1, 2, 5, 6])
def test_loop(separate_cls, length):
    """Section 2.2 and appendix A.2.1 pair by pair, with gradients of all weights."""
    ours = shaken(create("funnel", dim=16, heads=2, separate_cls=separate_cls, spacing=2))

    def loop(x):
        rows = []
        for row in x:
            tokens = list(range(length))
            if separate_cls:
                body = tokens[1:-1] if length > 1 else []
                pairs = [[0], *(body[i : i + 2] for i in range(0, len(body), 2))]
            else:
                pairs = [tokens[i : i + 2] for i in range(0, length, 2)]
            out = []
            for i, pair in enumerate(pairs):
                mean = row[pair].mean(0)
                heads = []
                for h in range(2):
                    part, scores = slice(8 * h, 8 * h + 8), []
                    for j in tokens:
                        score = (ours.q_proj(mean)[part] + ours.content_bias[h]) @ ours.k_proj(row[j])[part]
                        if not separate_cls or (i > 0 and j > 0):
                            angle = 2 * (pair[0] - j) * 10000.0 ** (-torch.arange(8, dtype=x.dtype) / 8)
                            r = ours.r_proj(torch.cat([angle.sin(), angle.cos()]))[part]
                            score = score + (ours.q_proj(mean)[part] + ours.position_bias[h]) @ r
                        scores.append(score / 8**0.5)
                    heads.append(torch.stack(scores).softmax(0) @ ours.v_proj(row)[:, part])
                out.append(ours.norm(mean + ours.o_proj(torch.cat(heads))))
            rows.append(torch.stack(out))
        return torch.stack(rows)

    x = torch.randn(2, length, 16, dtype=torch.float64)
    assert_graded(lambda x: ours(x)[0], loop, x, list(ours.parameters()), 1e-10)


@pytest.mark.parametrize("separate_cls", [True, False])
@pytest.mark.parametrize("length", [8, 7])
def test_upsampling(separate_cls, length):
    from transformers.models.funnel.modeling_funnel import upsample

    y = create("funnel", dim=32, separate_cls=separate_cls)(torch.randn(2, length, 32))[0]
    wanted = upsample(y, 2, length, separate_cls, truncate_seq=True)
    assert torch.equal(upsampled(y, length, separate_cls=separate_cls), wanted)


def test_refusals():
    with pytest.raises(ValueError, match="spacing must be at least 1, but came as 0"):
        create("funnel", dim=32, spacing=0)
    with pytest.raises(ValueError, match="dim must be even"):
        create("funnel", dim=5, heads=1)
