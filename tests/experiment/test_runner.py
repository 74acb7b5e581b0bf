"""The runner with an instant study; studies of `linattn reproduce` are tested in tests/reproduce."""

import json
import time

import pytest

from linattn.experiment import runner
from linattn.experiment.study import LeftOut
from linattn.report.folder import Folder
from tests.reproduce import toy


class Record(runner.Record):
    def fill(self):
        self.report["schema"], self.report["results"] = "linattn.compare", [result for _, result in self.results()]

    def said(self, one):
        return one.run["mixer"]


def record(tmp_path, measure, **changes):
    def runs(settings, done):
        return [{"mixer": "gla", "seed": seed} for seed in range(3 if len(done) < 3 else 4)]

    made = Record(Folder(tmp_path), toy.study(runs=runs, measure=measure, **changes), None)
    made.folder.begin(made.report | {"schema": "linattn.compare"})
    return made


def test_all_is_done_and_a_result_may_ask_for_more(tmp_path, capsys):
    one = record(tmp_path, lambda run: {"twice": 2 * run["seed"], "worst": float("nan")})
    assert runner.run(one, "a title", progress=True)
    assert json.loads(one.folder.json.read_text())["results"] == [{"twice": 2 * seed, "worst": None} for seed in range(4)]
    assert capsys.readouterr().err.splitlines() == [*(f"a title: {i} of 3: gla" for i in (1, 2, 3)), "a title: 4 of 4: gla"]


def test_what_is_done_is_on_disk_when_an_error_ends_a_strict_study(tmp_path):
    def measure(run):
        if run["seed"] == 1:
            raise ValueError("no more")
        return {"seed": run["seed"]}

    one = record(tmp_path / "strict", measure, strict=True)
    with pytest.raises(ValueError, match="^no more$"):
        runner.run(one, "", progress=False)
    assert json.loads(one.folder.json.read_text())["results"] == [{"seed": 0}]
    other = record(tmp_path / "other", measure)
    assert not runner.run(other, "", progress=False)
    assert [failed.error for failed in other.failed] == ["ValueError: no more"] and [r["seed"] for r in other.report["results"]] == [0, 2]


def test_what_was_left_out_is_a_result(tmp_path):
    def measure(run):
        raise LeftOut("too long")

    one = record(tmp_path, measure, strict=True)
    assert runner.run(one, "", progress=False)
    assert one.report["results"] == [{"left_out": "too long"}] * 4


def test_nothing_is_begun_after_the_end(tmp_path, monkeypatch):
    one, begun = record(tmp_path, lambda run: {}), []

    def work(study, missing, end):
        begun.append(end)
        raise InterruptedError  # an endless runner would loop forever

    monkeypatch.setattr(runner, "work", work)
    assert not runner.run(one, "", progress=False, end=0.0) and one.report == {} and not begun
    later = time.monotonic() + 600
    with pytest.raises(InterruptedError):
        runner.run(one, "", progress=False, end=later)
    assert begun == [later], "rounds begin nothing after it either"
