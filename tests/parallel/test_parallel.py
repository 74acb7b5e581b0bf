"""Context parallelism equals one process: operations, mixers and models on two gloo processes, started once for all cases."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.pair import answer_of

CASES = ("tests.parallel.op_cases:attention_cases", "tests.parallel.op_cases:other_cases", "tests.parallel.model_cases:cases")
STEPWISE = "tests.parallel.op_cases:stepwise_cases"
TENSOR = "tests.parallel.tensor_cases:cases"
MIXERS = "tests.parallel.mixer_cases:cases"
KERNELS = "tests.parallel.kernel_cases:cases"


def wrong(folder: Path, ranks: int, *cases: str) -> list[str]:
    """Errors found by the processes."""
    answers = answer_of("tests.parallel.worker", folder, str(ranks), *cases, timeout=540, ranks=ranks)
    assert answers
    return [f"{name}: {said}" for name, said in answers.items() if said is not None]


@pytest.mark.slow
def test_two_processes_equal_one(tmp_path: Path) -> None:
    problems = wrong(tmp_path, 2, *CASES, STEPWISE, TENSOR)
    assert not problems, "\n".join(problems)


@pytest.mark.slow
def test_the_kernels_in_two_processes_equal_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In Triton's interpreter, with the kernels' own exchange of states."""
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    problems = wrong(tmp_path, 2, KERNELS)
    assert not problems, "\n".join(problems)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="each process has a GPU of its own")
@pytest.mark.parametrize("cases", [KERNELS, *CASES, TENSOR, MIXERS], ids=lambda cases: cases.split(".")[-1])
def test_two_gpus_equal_one(cases: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LINATTN_TEST_DEVICE", "cuda")
    problems = wrong(tmp_path, 2, cases)
    assert not problems, "\n".join(problems)


@pytest.mark.slow
def test_every_mixer_in_two_processes_equals_one(tmp_path: Path) -> None:
    problems = wrong(tmp_path, 2, MIXERS)
    assert not problems, "\n".join(problems)


@pytest.mark.slow
def test_nine_processes_pass_their_states_on(tmp_path: Path) -> None:
    """More processes than those for which states are all-gathered."""
    problems = wrong(tmp_path, 9, STEPWISE)
    assert not problems, "\n".join(problems)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [3, 4])
def test_more_processes_equal_one(tmp_path: Path, ranks: int) -> None:
    problems = wrong(tmp_path, ranks, *CASES, STEPWISE, MIXERS, *([TENSOR] if ranks == 4 else []))
    assert not problems, "\n".join(problems)
