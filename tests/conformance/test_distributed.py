"""DDP and FSDP2 on two gloo processes train every mixer to the weights of one process. One pair of processes runs all of them."""

from __future__ import annotations

from pathlib import Path

import pytest

import linattn.mixers
from linattn.mixers import Mixer
from tests.conformance.broken import LeaksRows, Sound, UnusedParameter
from tests.conformance.checks import WRAPPERS
from tests.pair import answer_of
from tests.programs import Programs


def run(programs: Programs, folder: Path, *classes: type[Mixer]) -> dict[type[Mixer], dict[str, str | None]]:
    """Run both processes on ``classes``; returns the errors of each under each wrapper."""
    entries = {f"{cls.__module__}:{cls.__qualname__}": cls for cls in classes}
    answer = answer_of("tests.conformance.distributed", folder, *entries, timeout=300, programs=programs)
    return {entries[entry]: found for entry, found in answer.items()}


@pytest.mark.slow
def test_ddp_and_fsdp2_equal_one_process(tmp_path: Path, programs: Programs) -> None:
    infos = list(map(linattn.mixers.info, linattn.mixers.available()))
    answers = run(programs, tmp_path, Sound, LeaksRows, UnusedParameter, *(i.cls for i in infos))
    assert answers.pop(Sound) == dict.fromkeys(WRAPPERS), "the sound one passes"
    for broken in (LeaksRows, UnusedParameter):
        assert all(answers.pop(broken).values()), f"{broken.__name__} is caught"
    problems = []
    for info in infos:
        for wrapper in WRAPPERS:
            said, reason = answers[info.cls][wrapper], info.exemptions.get(wrapper)
            if said is not None and reason is None:
                problems.append(f"{info.name} under {wrapper}: {said}")
            if said is None and reason is not None:
                problems.append(f"{info.name} under {wrapper}: passes; its exemption ({reason}) is stale")
    assert not problems, "\n".join(problems)
