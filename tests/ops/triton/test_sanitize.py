"""The program for compute-sanitizer runs every kernel."""

import re
from pathlib import Path

import pytest

from tests.ops.triton import sanitize
from tests.ops.triton.device import INTERPRETED

KERNELS = Path(__file__).parents[3] / "linattn/ops/triton"
WITH_OPTIONS = r"@triton\.jit\(do_not_specialize=[^)]*\)\ndef (\w+)\("  # kernels with runtime integers
NAMED = r"@triton\.jit\ndef (\w+_kernel)\("


@pytest.fixture
def launched(monkeypatch):
    """The kernels, by module and name."""
    from triton.runtime.interpreter import InterpretedFunction

    found, get = set(), InterpretedFunction.__getitem__

    def noted(self, grid):
        found.add((self.fn.__module__.rpartition(".")[2], self.fn.__name__))
        return get(self, grid)

    monkeypatch.setattr(InterpretedFunction, "__getitem__", noted)
    return found


@pytest.mark.slow
@pytest.mark.skipif(not INTERPRETED, reason="it takes longer, and says the same")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_every_kernel_has_its_turn(launched, monkeypatch):
    """Except those of the recurrence, which ``sanitize.recurrence`` runs."""
    from linattn.ops.triton import scan

    monkeypatch.setattr(scan, "processors", lambda device: 4)
    monkeypatch.setattr(sanitize, "TOKENS", 66)
    monkeypatch.setattr(sanitize, "DTYPES", ("float32",))
    for part in sanitize.ALONE.values():
        part()
    sources = {path.stem: path.read_text(encoding="utf-8") for path in KERNELS.glob("*.py")}
    kernels = {(name, found) for name, text in sources.items() for how in (WITH_OPTIONS, NAMED) for found in re.findall(how, text)}
    kernels -= {pair for pair in kernels if pair[0] in ("prepare", "state_scan", "state_fold", "gradients", "unsettled")}
    assert len(kernels) > 15
    assert sorted(kernels - launched) == []


def test_races_within_a_warpgroup_are_told_and_those_between_two_of_a_hopper_kernel_are_not():
    def report(first: int, second: int, file: str) -> str:
        threads = f"Write Thread ({first},0,0) at f+0x10 in {file}:1", f"Read Thread ({second},0,0) at f+0x20 in {file}:2"
        lines = "Error: Potential RAW hazard detected at __shared__ 0x40 in block (0,0,0) :", *threads, "Current Value : 1"
        return "".join(f"=========     {line}\n" for line in lines)

    hopper, other = "/linattn/ops/triton/hopper/forward.py", "/linattn/ops/triton/state_scan.py"
    assert sanitize.races(report(0, 130, hopper)) == ""
    assert sanitize.races(report(0, 127, hopper)) == f"1 hazards: f+0x10 in {hopper}:1 and f+0x20 in {hopper}:2"
    assert sanitize.races(report(0, 130, other) * 2).startswith("2 hazards: f+0x10")
    assert "not understood" in sanitize.races(report(0, 130, hopper) + "Error: Potential RAW hazard detected at __shared__ 0x44\n")
    assert "not understood" in sanitize.races("========= RACECHECK SUMMARY: 3 hazards displayed")
