import pytest

from linattn.reproduce import ledger, results
from tests.reproduce import toy


@pytest.fixture
def given(monkeypatch):
    """Replaces the study "recall" by a toy; returns the list of finished runs."""

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
