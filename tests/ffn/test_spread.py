"""Experts spread over two gloo processes equal one process: values, losses, and gradients through updated weights."""

from __future__ import annotations

import pytest

from tests.pair import answer_of


@pytest.fixture(scope="module")
def found(tmp_path_factory, programs) -> dict[str, float | str]:
    return answer_of("tests.ffn.spreading", tmp_path_factory.mktemp("spread"), timeout=120, programs=programs)


@pytest.mark.parametrize("case", ["switch", "gshard", "st_moe", "experts", "gshard without capacity", "unequal", "evaluated"])
def test_two_processes_equal_one(found, case):
    assert found[case] < 1e-12


def test_refused(found):
    assert "count must be a multiple of the 2 processes, but model has 3 experts" in found["refused"]
    assert "model is spread already" in found["refused"]
    assert "model must have a mixture of experts to spread" in found["refused"]
