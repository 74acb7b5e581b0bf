"""The order of the data is a function of (seed, i), visits every window once per pass, and stays inside the text."""

import numpy as np
import pytest

from linattn.data.packed import PackedTokens, Windows, permuted


@pytest.mark.parametrize("n", [1, 2, 3, 7, 64, 65, 1000])
def test_permutations(n):
    orders = [[permuted(i, n, key) for i in range(n)] for key in range(4)]
    for order in orders:
        assert sorted(order) == list(range(n))
    if n > 6:
        assert len({tuple(order) for order in orders}) == 4
        assert list(range(n)) not in orders


def test_a_permutation_is_mixed():
    order = np.array([permuted(i, 5000, 3) for i in range(5000)])
    assert abs(np.corrcoef(np.arange(5000), order)[0, 1]) < 0.05
    assert (np.diff(order) == 1).mean() < 0.01


@pytest.mark.parametrize("length", [8, 9, 15, 16, 17, 31, 100])
def test_samples_lie_in_the_text_and_a_pass_does_not_repeat(length):
    tokens = np.arange(length, dtype=np.uint8)
    data = PackedTokens(tokens, 8, seed=5, samples=300)
    for epoch in range(20):
        starts = [data.place(epoch * data.windows + i) for i in range(data.windows)]
        assert min(starts) >= 0
        assert max(starts) + 8 <= length
        assert len({s // 8 for s in sorted(starts)}) == len(starts)
        assert all(b - a >= 8 for a, b in zip(sorted(starts), sorted(starts)[1:], strict=False))


def test_samples_are_windows():
    tokens = np.arange(1000, dtype=np.uint16)
    item = PackedTokens(tokens, 8, samples=5)[3]
    start = item["input_ids"][0].item()
    assert item["input_ids"].tolist() == list(range(start, start + 8)) == item["labels"].tolist()


def test_a_sample_depends_on_seed_and_index_alone():
    tokens = np.arange(1000, dtype=np.uint16)
    one, two = (PackedTokens(tokens, 8, seed=7, samples=500) for _ in range(2))
    assert [one.place(i) for i in range(400)] == [two.place(i) for i in reversed(range(400))][::-1]
    other = PackedTokens(tokens, 8, seed=8, samples=500)
    assert [one.place(i) for i in range(50)] != [other.place(i) for i in range(50)]
    assert [one.place(i) for i in range(50)] != [one.place(one.windows + i) for i in range(50)]


def test_the_order_is_frozen():
    """Runs begun by older versions must continue with the same data."""
    data = PackedTokens(np.zeros(10_000, np.uint8), 16, seed=3, samples=9)
    assert [data.place(i) for i in (0, 1, 2, 700, 123_456)] == [6265, 5033, 8745, 6129, 9516]


@pytest.mark.parametrize(("length", "count", "starts"), [(8, 4, [0]), (40, 4, [0, 10, 21, 32]), (17, 9, [0, 9])])
def test_validation_windows_are_spread_evenly(length, count, starts):
    data = Windows(np.arange(length), 8, count)
    assert [data[i]["input_ids"][0].item() for i in range(len(data))] == starts


def test_too_short():
    with pytest.raises(ValueError, match="7 tokens, fewer than the context of 8"):
        PackedTokens(np.zeros(7, np.uint8), 8, samples=1)
    with pytest.raises(ValueError, match="validation part of the text has 7 tokens, fewer than the context of 8"):
        Windows(np.zeros(7, np.uint8), 8, 1)
