"""The comparison of compilers of a decoding step, with a tiny model."""

import pytest

from benchmarks import compilers

GLA = compilers.Job("gla", "tiny", "cpu", "float32", rows=1, context=8, ways=("captured", "CUDA graph"))


def by_way(rows):
    return {(row["model"], row["way"]): row for row in rows}


def test_each_way_is_a_row_and_one_that_fails_says_why():
    found = by_way(compilers.in_turn([GLA], steps=1, turns=1))
    assert set(found) == {("gla", "as written"), ("gla", "captured"), ("gla", "CUDA graph")}
    assert found["gla", "CUDA graph"]["failed"] == "NotImplementedError: CUDA graphs are for GPUs"
    captured = found["gla", "captured"]
    assert captured["equal"] == captured["of"] == 16 and captured["step_ms"] > 0
    assert "16 of 16 tokens equal" in compilers.line(captured)


@pytest.mark.slow
def test_at_once_a_process_that_dies_takes_no_other_with_it(capfd):
    jobs = [compilers.Job("nothing", "tiny", "cpu", "float32", 1, 8, ("captured",)), GLA]
    found = by_way(compilers.at_once(jobs, steps=1, turns=1))
    assert found["nothing", "all"]["failed"] == "the process ended with 1"
    assert found["gla", "captured"]["equal"] == 16 and found["gla", "captured"]["made_beside"] == 1
    assert "nothing" in capfd.readouterr().err
