"""Tests of the suite: every defective mixer fails the check made for its defect, and no unrelated one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from linattn.mixers import Mixer, registry
from tests.conformance.broken import FAILS, Renamed, SeesOnlyTheWindow, Sound
from tests.conformance.broken_kinds import SoundAcross, SoundBothWays, SoundFeedForward, SoundGrid, SoundHalving
from tests.conformance.checks import CHECKS, HALVES, WRAPPERS, exemption, verify

DEAR = {"compile", "compile_layouts", "forms"}  # expensive checks, run only on mixers that should fail them


def half(mixer: type[Mixer]) -> str:
    return "bidirectional" if mixer.info.bidirectional else mixer.info.kind


def failed(mixer: type[Mixer]) -> set[str]:
    """The checks of its half that ``mixer`` does not pass."""
    asked = (name for name in HALVES[half(mixer)] if name not in DEAR or name in FAILS[mixer])
    return {name for name in asked if exemption(mixer.info, half(mixer), name) is None and not passes(name, mixer)}


def passes(check: str, mixer: type[Mixer]) -> bool:
    try:
        HALVES[half(mixer)][check](mixer)
    except (Exception, pytest.fail.Exception):
        return False
    return True


@pytest.fixture
def known(monkeypatch):
    """Register a class for the time of a test, since the cost sheet takes names."""
    return lambda cls: monkeypatch.setitem(registry._registered, cls.info.name, cls.info)


@pytest.mark.parametrize("sound", [Sound, SoundBothWays, SoundAcross, SoundGrid, SoundHalving, SoundFeedForward], ids=lambda c: c.__name__)
def test_the_sound_one_passes(known, sound):
    known(sound)
    for name, check in HALVES[half(sound)].items():
        if exemption(sound.info, half(sound), name) is None:
            check(sound)


@pytest.mark.parametrize("mixer", FAILS, ids=lambda cls: cls.__name__)
def test_the_broken_one_is_caught(known, mixer):
    known(mixer)
    assert set(FAILS[mixer]) <= {*HALVES[half(mixer)], *WRAPPERS}
    assert failed(mixer) == set(FAILS[mixer]) - set(WRAPPERS)


@pytest.mark.parametrize(
    "changes",
    [
        {"title": ""},
        {"paper": " "},
        {"oracle": ""},
        {"year": 0},
        {"arxiv": "12.34"},
        {"arxiv": "0901.00001"},
        {"equation": "{"},
        {"name": "Two Words"},
        {"exemptions": {"nothing": "there is no such check"}},
        {"exemptions": {"past": "because"}},
    ],
    ids=str,
)
def test_an_incomplete_entry_is_caught(monkeypatch, changes):
    monkeypatch.setattr(Sound, "info", replace(Sound.info, **changes))
    with pytest.raises(AssertionError):
        CHECKS["info"](Sound)


def test_exemptions():
    with pytest.raises(pytest.xfail.Exception, match="a reason"):
        verify("past", SeesOnlyTheWindow, "a reason")
    with pytest.raises(pytest.fail.Exception, match="stale"):
        verify("past", Sound, "a reason")
    with pytest.raises(AssertionError, match="gradient of the first token"):
        verify("past", SeesOnlyTheWindow, None)


def test_a_mixer_that_the_golden_file_does_not_know(monkeypatch):
    monkeypatch.setattr(Renamed, "info", replace(Renamed.info, name="new"))
    with pytest.raises(AssertionError, match=r"run `python -m tests.conformance.golden`"):
        CHECKS["golden"](Renamed)
    with pytest.raises(AssertionError, match=r"no tests/oracles/test_new\.py"):
        CHECKS["oracle"](Renamed)
