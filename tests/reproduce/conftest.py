import pytest

from linattn.reproduce import ledger, results
from tests.reproduce import toy


@pytest.fixture
def given(monkeypatch):
    """Makes a toy the study "recall"; its value is the list of runs that were done."""

    def give(**changes):
        done = []

        def measure(run):
            done.append(run)
            return toy.measure(run)

        study = toy.study(**{"measure": measure, **changes})
        monkeypatch.setattr(ledger, "load", lambda name: study)
        monkeypatch.setattr(results, "load", lambda name: study)
        return done

    return give
