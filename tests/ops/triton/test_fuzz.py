"""The fuzzer of the GPU kernels runs in this process, and its log lists the calls."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from benchmarks import fuzz
from tests.ops.triton.device import INTERPRETED


@pytest.mark.skipif(not INTERPRETED, reason="on a GPU it is run by hand, with a thousand cases")
def test_the_fuzzer_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(fuzz, "ProcessPoolExecutor", lambda workers, mp_context: ThreadPoolExecutor(workers))
    assert fuzz.main(["--cases", "4", "--workers", "1", "--out", str(tmp_path / "log.json")]) == 0
    log = json.loads((tmp_path / "log.json").read_text())
    assert log["command"] == "python -m benchmarks.fuzz --cases 4 --workers 1"
    assert sum(family["cases"] for family in log["families"].values()) == 4 and not log["failures"]
    assert all(family["worst"] for family in log["families"].values())
