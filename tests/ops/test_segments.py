"""Number of segments of a sequence: the fastest on an H200, determined from shapes."""

import pytest

pytest.importorskip("triton")

from linattn.ops.triton.plan import CHANNEL, DELTA, ERASE, HEAD, PLAIN, Family, plan, segments

RULES = {"mamba2": (HEAD, PLAIN), "gla": (CHANNEL, PLAIN), "gated delta": (HEAD, DELTA), "kda": (CHANNEL, DELTA), "rwkv7": (CHANNEL, ERASE)}


@pytest.mark.parametrize(
    ("tokens", "states", "size", "light", "other"),
    [
        (1024, 16, 128, 1, 1),  # too few tokens to be worth two passes
        (2048, 16, 128, 4, 4),
        (4096, 16, 128, 8, 4),
        (8192, 16, 128, 8, 4),  # half of the multiprocessors read about as fast as all
        (32768, 16, 128, 8, 8),
        (8192, 8, 128, 16, 8),
        (8192, 64, 128, 1, 1),  # half of them have work without any segments
        (4096, 64, 64, 4, 1),  # two share a multiprocessor
        (8192, 32, 64, 8, 4),
        (32768, 32, 64, 8, 4),
        (8192, 32, 256, 1, 1),  # two programs for 256 values
        (1 << 20, 1, 128, 128, 128),
    ],
)
@pytest.mark.parametrize("name", RULES)
def test_as_many_segments_as_are_worth_it(name, tokens, states, size, light, other):
    decay, rule = RULES[name]
    family = Family(decay, rule, before=False, half=True)
    assert segments(family, tokens, states, (min(size, 128), size)) == (light if name == "mamba2" else other)


def test_segments_cover_all_tokens_and_end_with_a_chunk():
    family = Family(HEAD, PLAIN, before=False, half=True)
    for tokens in (1, 63, 2048, 2100, 5000, 100_003):
        cut = plan(family, 2, tokens, 8, (64, 64), 2, packed=False)
        pieces = cut.segments // 2
        assert cut.length % cut.chunk == 0
        assert (pieces - 1) * cut.length < tokens <= pieces * cut.length
        assert cut.split == (pieces > 1)
        assert cut.chunks == 2 * -(-tokens // cut.chunk)
