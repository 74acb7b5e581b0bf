"""A single token has the bits of a block of one, and its state is updated in place."""

import itertools

import pytest
import torch

from linattn.ops.cpu import linear_attention

RULES = ["plain", "bonus", "delta", "erase"]


def arguments(rule, rank, normalized, dtype, shape):
    B, H, group, K, V = shape
    generator = torch.Generator().manual_seed(0)

    def some(*sizes):
        return torch.randn(*sizes, generator=generator)

    keys = (B, 1, H // group, K)
    erase = rule == "erase"
    return (
        some(*keys).to(dtype), some(*keys).to(dtype) / 3, some(B, 1, H, V).to(dtype),
        (None, -some(B, 1, H).abs(), -some(B, 1, H, K).abs())[rank], some(B, 1, H).sigmoid() if rule == "delta" else None,
        some(B, 1, H, K).to(dtype) if erase else None, some(B, 1, H, K).to(dtype) / 3 if erase else None,
        some(H, K) if rule == "bonus" else None, some(B, H, K, V), some(B, H, K) if normalized else None, None, 0.7, normalized,
    )  # fmt: skip


@pytest.mark.parametrize("shape", [(1, 8, 1, 20, 40), (2, 4, 2, 7, 17), (1, 1, 1, 6, 70), (9, 2, 1, 3, 5)])
@pytest.mark.parametrize("rule", RULES)
def test_a_token_has_the_bits_of_a_block(isa, rule, shape):
    """A pass that saves states for backward uses blocks."""
    for rank, normalized, dtype in itertools.product(range(3), (False, True), (torch.float32, torch.bfloat16)):
        given = arguments(rule, rank, normalized, dtype, shape)
        one, block = (linear_attention.forward(*given, keeps)[:4] for keeps in (False, True))
        assert all(torch.equal(a, b) and bool(a.isfinite().all()) for a, b in zip(one[:2], block[:2], strict=True))
        if normalized:
            for a, b in zip(one[2:], block[2:], strict=True):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rule", RULES)
def test_a_bound_step_goes_on_from_its_own_state(isa, rule):
    """Three tokens in place, against three passes with returned states."""
    given = arguments(rule, 2, True, torch.float32, (1, 3, 1, 20, 40))
    o, denominator, run = linear_attention.bound_step(*(t.clone() if isinstance(t, torch.Tensor) else t for t in given))
    for _ in range(3):
        run()
        wanted, S, wanted_denominator, z, _ = linear_attention.forward(*given, False)
        given = (*given[:8], S, z, *given[10:])
        assert torch.equal(o, wanted) and torch.equal(denominator, wanted_denominator)
