"""Tensors [B, H, T, K], other libraries' layout, give a hint."""

import warnings

import pytest
import torch

import linattn
from linattn.ops.checks import HEADS_FIRST

Q = torch.randn(2, 4, 100, 8)  # [B, H, T, K]
TURNED = Q.transpose(1, 2)


@pytest.mark.parametrize(
    ("tensors", "options"),
    [
        ((Q, Q, Q), {"decay": -torch.rand(2, 100, 4)}),
        ((Q, Q, Q), {"decay": -torch.rand(2, 100, 4, 8)}),
        ((Q, Q, Q), {"beta": torch.rand(2, 100, 4)}),
        ((TURNED, TURNED, Q), {}),
        ((Q, TURNED, TURNED), {}),
    ],
)
def test_an_error_ends_with_the_hint(tensors, options):
    with pytest.raises(ValueError, match="transpose") as error:
        linattn.linear_attention(*tensors, **options)
    assert str(error.value).endswith(HEADS_FIRST)


def test_other_errors_have_no_hint():
    with pytest.raises(ValueError, match="decay must have shape") as error:
        linattn.linear_attention(Q, Q, Q, decay=-torch.rand(2, 5, 4))
    assert HEADS_FIRST not in str(error.value)


def test_many_heads_and_few_tokens_are_warned_of_where_the_call_stands():
    with pytest.warns(UserWarning, match=r"read as T = 4 tokens of H = 100 heads; .*transpose") as told:
        linattn.linear_attention(Q, Q, Q)
    assert told[0].filename in (__file__, linattn.ops.sharding.__file__)


@pytest.mark.parametrize("shape", [(1, 1, 100, 8), (1, 8, 32, 8), (2, 100, 4, 8), (1, 40, 80, 8), (1, 0, 64, 8)])
def test_steps_and_short_prompts_are_not(shape):
    q = torch.randn(shape)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        linattn.linear_attention(q, q, q)


def test_mixers_with_many_heads_are_not():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        linattn.mixers.create("gla", dim=512, heads=64)(torch.randn(1, 3, 512))
