"""Attribution of processor time by `--durations-json`."""

from types import SimpleNamespace

import pytest

from tests import durations


@pytest.mark.parametrize("last", [False, True])
def test_what_ends_with_the_session_is_not_the_last_tests(last):
    recorded, item = durations.Durations(None, clock=iter([10.0, 11.0, 13.0, 16.0]).__next__), SimpleNamespace()
    recorded.pytest_runtest_setup(item)
    for when in ("setup", "call", "teardown"):
        if when == "teardown":
            recorded.pytest_runtest_teardown(item, None if last else object())
        report = made(recorded, item, SimpleNamespace(when=when), SimpleNamespace(nodeid="tests/a.py::test_b"))
        recorded.pytest_runtest_logreport(report)
    assert recorded.tests == ({"tests/a.py::test_b": 3.0, durations.SESSION: 3.0} if last else {"tests/a.py::test_b": 6.0})


def made(recorded, item, call, report):
    """Result of the wrapper for pytest's report."""
    wrapper = recorded.pytest_runtest_makereport(item, call)
    next(wrapper)
    with pytest.raises(StopIteration) as done:
        wrapper.send(report)
    return done.value.value
