import pytest

from linattn.experiment.sizing import Size, equal_sizes


def _count(costs):
    return lambda name, width: costs[name] + 3 * 64 * width


def test_widths_come_as_near_as_steps_of_one_allow():
    count = _count({"a": 40_000, "b": 61_111, "c": 20_000})
    target = count("a", 170)
    sizes = equal_sizes(["a", "b", "c"], target, count)
    assert sizes["a"] == Size(170, target)
    for name, size in sizes.items():
        assert size.parameters == count(name, size.ffn_dim)
        assert abs(size.parameters - target) <= min(abs(count(name, size.ffn_dim + s) - target) for s in (-1, 1))


def test_a_mixer_that_is_too_large_is_refused_with_the_figures():
    with pytest.raises(ValueError, match=r"parameter counts of these mixers.*a 21,920 .*b 900,192 \(feed-forward width 1\)"):
        equal_sizes(["a", "b"], 21_920, _count({"a": 20_000, "b": 900_000}))


@pytest.mark.parametrize(("extra", "fits"), [(1.019, True), (1.021, False)])
def test_two_per_cent_is_the_limit(extra, fits):
    count = _count({"a": 100_000 - 192, "b": round(100_000 * extra) - 192})
    if fits:
        assert equal_sizes(["a", "b"], 100_000, count)["b"].ffn_dim == 1
    else:
        with pytest.raises(ValueError, match="within 2%"):
            equal_sizes(["a", "b"], 100_000, count)
