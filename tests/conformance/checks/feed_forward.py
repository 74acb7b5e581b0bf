"""Checks of feed-forwards: any leading shape."""

from __future__ import annotations

from tests.conformance.tools import TOKENS, WIDTH, Make, assert_same, build, tokens


def check_leading(make: Make) -> None:
    """Tokens may come in any leading shape."""
    mixer, x = build(make), tokens(2, TOKENS)
    assert_same({"the output": mixer(x.view(-1, WIDTH)).view_as(x)}, {"the output": mixer(x)}, "a list of tokens", 1e-12)
