"""Prints each mixer's processor time with ``--durations``; none should take more than three seconds."""

from __future__ import annotations

import re
import time
from collections import Counter

import pytest

MIXER = re.compile(r"test_mixer\[(\w+)-")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    start = time.process_time()
    try:
        return (yield)
    finally:
        item.user_properties.append(("processor_seconds", time.process_time() - start))


def pytest_terminal_summary(terminalreporter) -> None:
    if terminalreporter.config.option.durations is None:
        return
    seconds: Counter[str] = Counter()
    reports = [report for reports in terminalreporter.stats.values() for report in reports]
    for report in reports:
        found = MIXER.search(getattr(report, "nodeid", ""))
        if found and getattr(report, "when", "") == "call":
            seconds[found[1]] += dict(getattr(report, "user_properties", ())).get("processor_seconds", 0.0)
    terminalreporter.section("processor seconds of each mixer")
    for name, spent in seconds.most_common():
        terminalreporter.write_line(f"{spent:6.2f}s {name}")
