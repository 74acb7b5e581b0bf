import math

import pytest

from linattn.report.scales import linear, logarithmic


@pytest.mark.parametrize(
    ("values", "ticks"),
    [
        ([256, 16384], (256, 512, 1024, 2048, 4096, 8192, 16384)),
        ([300, 900], (256, 512, 1024)),
        ([1024], (1024, 2048)),
    ],
)
def test_powers_of_two(values, ticks):
    scale = logarithmic(values, base=2, count=7)
    assert scale.ticks == ticks
    assert (scale.low, scale.high) == (ticks[0], ticks[-1])


@pytest.mark.parametrize(
    ("values", "ticks"),
    [
        ([1.5, 7.9], (1, 2, 5, 10)),
        ([2.0], (2, 5)),
        ([0.8, 23], (0.5, 1, 2, 5, 10, 20, 50)),
        ([1.61, 1.64], (1, 2)),
    ],
)
def test_decades(values, ticks):
    assert logarithmic(values).ticks == pytest.approx(ticks)


def test_many_decades_keep_their_ends_and_the_powers():
    scale = logarithmic([0.03, 400])
    assert (scale.low, scale.high) == pytest.approx((0.02, 500))
    assert scale.ticks == pytest.approx((0.1, 1, 10, 100))


def test_many_octaves_are_thinned():
    scale = logarithmic([2**10, 2**40], base=2, count=6)
    assert len(scale.ticks) <= 7
    assert scale.ticks[0] == 2**10
    steps = {round(math.log2(b / a)) for a, b in zip(scale.ticks[:-1], scale.ticks[1:], strict=True)}
    assert len(steps) == 1, "ticks stand at equal distances"


def test_a_logarithm_needs_positive_values():
    with pytest.raises(ValueError, match="above 0"):
        logarithmic([0.0, 1.0])


def test_places():
    scale = logarithmic([1, 100])
    assert [scale(v) for v in (1, 10, 100)] == pytest.approx([0, 0.5, 1])
    assert scale(1000) == 1
    assert scale(0.1) == 0
    assert linear([0, 10])(2.5) == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("values", "zero", "ticks"),
    [
        ([0, 200], False, (0, 50, 100, 150, 200)),
        ([2.21, 2.89], False, (2.2, 2.4, 2.6, 2.8, 3.0)),
        ([37.9], True, (0, 10, 20, 30, 40)),
        ([3.0, 3.0], False, (2.4, 2.6, 2.8, 3.0, 3.2, 3.4, 3.6)),
        ([0.0], True, (0, 0.2, 0.4, 0.6, 0.8, 1.0)),
    ],
)
def test_linear(values, zero, ticks):
    scale = linear(values, zero=zero)
    assert scale.ticks == pytest.approx(ticks)
    assert scale.low <= min(values)
    assert scale.high >= max(values)
