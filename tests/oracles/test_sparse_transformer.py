"""Sparse Transformers against masks as in openai/sparse_attention.

Its code runs only on TensorFlow 1. Its get_attn_mask keeps, for "local", l tokens up to the query and, for "strided", the earlier
tokens at a distance that l divides; heads have one or the other. The fixed pattern is that of the paper's section 4.3.
"""

import pytest
import torch

from linattn.mixers import create
from tests.oracles.patterns import assert_pattern, drawn


@pytest.mark.parametrize("length", [1, 4, 9, 40])
@pytest.mark.parametrize("kind", ["strided", "fixed"])
@pytest.mark.parametrize("merged", [True, False])
@pytest.mark.parametrize("causal", [True, False])
def test_masks(length, kind, merged, causal):
    stride, summary = 5, 2
    ours = create(
        "sparse_transformer", dim=32, kind=kind, stride=stride, summary=summary, merged=merged, causal=causal
    ).double()  # fmt: skip

    def near(i, j):
        return abs(i - j) < stride if kind == "strided" else i // stride == j // stride

    def far(i, j):
        return (i - j) % stride == 0 if kind == "strided" else j % stride in range(stride - summary, stride)

    masks = [drawn(length, lambda i, j, one=one: one(i, j) and (j <= i or not causal)) for one in (near, far)]
    masks = (masks[0] | masks[1])[None] if merged else torch.stack(masks).repeat_interleave(2, 0)
    x = torch.randn(2, length, 32, dtype=torch.float64)
    if not merged and kind == "fixed":
        return assert_zero_before_the_first_summary(ours, x, stride - summary, causal)
    return assert_pattern(ours, x, masks)


def assert_zero_before_the_first_summary(ours, x, first, causal):
    """Heads that see only summaries output zero before the first."""
    r = ours.recurrence(x, ours.begin(x))
    o = ours.attend(r, ours.begin(x))
    seen = first if causal else (x.shape[1] if x.shape[1] <= first else 0)
    assert not o[:, :seen, 2:].any()
    assert o[:, seen:, 2:].all() and o[:, :, :2].all()


def test_work_follows_the_pattern():
    """n l + n² / l pairs, up to the factor 2 of the tiles."""
    ours = create("sparse_transformer", dim=32, stride=64)
    (pattern,) = ours.patterns(None)
    for length in (4096, 16384):
        assert pattern.pairs(length) <= 2 * (length * 64 + length * length // 64)


def test_refusals():
    with pytest.raises(ValueError, match="kind must be one of 'strided', 'fixed', but came as 'random'"):
        create("sparse_transformer", dim=32, kind="random")
    with pytest.raises(ValueError, match="last must be an integer from 1 to 4, but came as 9"):
        create("sparse_transformer", dim=32, kind="fixed", stride=4, summary=9)
