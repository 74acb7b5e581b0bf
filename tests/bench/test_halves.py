"""The comparison of half precision with float32: every row's call is checked before timing, and the file has all rows."""

import json

import pytest
import torch

from benchmarks import halves
from tests.ops.errors import error

CASES = [(name, mode, make) for name, mode, make in halves.cases(5, 2)]


@pytest.mark.parametrize(("name", "mode", "make"), CASES, ids=[f"{name} {mode}" for name, mode, _ in CASES])
def test_every_dtype_computes_the_same(name, mode, make):
    """Up to the rounding of inputs and outputs: 2^-8 in bfloat16 and more for gradients that cancel, so 0.1 in norm."""
    results = {dtype: halves.pass_of(mode, make(dtype))() for dtype in (torch.float32, *halves.DTYPES)}
    flat = {d: [x for x in (r if isinstance(r, tuple) else (r,)) if isinstance(x, torch.Tensor)] for d, r in results.items()}
    for dtype in halves.DTYPES:
        for got, wanted in zip(flat[dtype], flat[torch.float32], strict=True):
            assert error(got, wanted) < 0.1


def test_the_file_has_the_rows_that_were_asked_for(tmp_path, capsys):
    threads = torch.get_num_threads()
    try:
        assert halves.main(["--only", "rms_norm", "--tokens", "8", "--rounds", "1", "--out", str(tmp_path / "x.json")]) == 0
    finally:
        torch.set_num_threads(threads)
    rows = json.loads((tmp_path / "x.json").read_text())["rows"]
    assert [(row["kernel"], row["mode"]) for row in rows] == [("rms_norm", "forward"), ("rms_norm", "forward+backward")]
    assert all(row[name] > 0 for row in rows for name in ("float32_ms", "bfloat16", "float16"))
    assert "rms_norm" in capsys.readouterr().out
