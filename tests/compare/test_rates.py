"""Learning rates of a comparison: given ones, and those of the sweep."""

from pathlib import Path

import pytest

from linattn.compare import rates
from linattn.compare.options import CompareOptions

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "learning-rates.json"


def _row(mixer, rate, seed, bits):
    return {"mixer": mixer, "learning_rate": rate, "seed": seed, "validation_bits_per_byte": bits}


def test_the_best_mean_over_the_seeds_is_chosen(monkeypatch):
    rows = [
        _row("gla", 0.004, 0, 2.0),
        _row("gla", 0.004, 1, 2.4),
        _row("gla", 0.002, 0, 2.1),
        _row("gla", 0.002, 1, 2.2),
        _row("h3", 1.0, 0, 1.0),
    ]
    monkeypatch.setattr(rates, "sweep", lambda: {"rows": rows})
    assert rates.chosen("gla") == 0.002, "0.004 has the best single seed, but the worse mean"
    assert rates.chosen("softmax") == rates.USUAL
    first, second = rates.swept("gla")
    assert (first["learning_rate"], second["learning_rate"]) == (0.002, 0.004)
    assert second["validation_bits_per_byte"] == pytest.approx(2.2)
    assert second["validation_bits_per_byte_spread"] == pytest.approx(0.4 / 2**0.5)


def test_the_package_has_the_committed_sweep():
    assert rates.SWEEP.exists() == RESULTS.exists()
    if RESULTS.exists():
        assert rates.SWEEP.read_bytes() == RESULTS.read_bytes(), f"copy {RESULTS.name} to {rates.SWEEP}"


def test_rates_for_all_and_for_one():
    options = CompareOptions(mixers=("softmax:conv_width=4", "gla", "h3"), learning_rate=("0.01", 0.002, "softmax:conv_width=4=0.004"))
    assert options.rates() == {"softmax:conv_width=4": [0.002, 0.004, 0.01], "gla": [0.002, 0.01], "h3": [0.002, 0.01]}
    assert "--learning-rate 0.01,0.002,softmax:conv_width=4=0.004" in options.command()
    assert CompareOptions(mixers=("gla",)).rates() == {"gla": []}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("0.01", 0.01), "must be different positive and finite rates"),
        (("nan",), "must be different positive and finite rates"),
        (("fast",), "must be different positive and finite rates"),
        (("gla=0",), "must be different positive and finite rates"),
        (("h3=0.01",), r"must name mixers of this comparison \(softmax, gla\), but names 'h3=0.01'"),
    ],
)
def test_wrong_rates_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        CompareOptions(mixers=("softmax", "gla"), learning_rate=given)
