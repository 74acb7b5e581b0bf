"""Folders of studies: foreign files, damage, two processes at once."""

import json
import os

import pytest

from linattn import reproduce
from linattn.cli.main import main
from linattn.reproduce import ledger
from linattn.state import only_writer


def test_folders_of_others_are_refused(given, tmp_path):
    given()
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(ValueError, match="not part of a linattn report"):
        reproduce.run("recall", out=tmp_path)
    reproduce.run("recall", out=tmp_path / "a")
    with pytest.raises(ValueError, match="holds the study 'recall'"):
        reproduce.run("capacity", out=tmp_path / "a")


def _without(key):
    return lambda report: report.pop(key)


DAMAGE = {
    "no study": _without("study"),
    "no runs": _without("runs"),
    "no machines": _without("machines"),
    "no created": _without("created"),
    "another version": lambda report: report.update(version=2),
    "runs of no list": lambda report: report.update(runs="gla"),
    "runs of no objects": lambda report: report.update(runs=[1]),
    "a run without its result": lambda report: report["runs"][0].pop("result"),
    "a result of no object": lambda report: report["runs"][0].update(result=3),
    "a result without its score": lambda report: report["runs"][0]["result"].pop("score"),
    "a score of no number": lambda report: report["runs"][0]["result"].update(score="high"),
    "a machine that is not there": lambda report: report["runs"][0].update(machine=7),
    "machines of no objects": lambda report: report.update(machines=["mine"]),
    "a study of no name": lambda report: report.update(study=["recall"]),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_report_is_named_and_stays(given, tmp_path, capsys, damage):
    given()
    report = reproduce.run("recall", mixers=["gla"], seeds=2, out=tmp_path)
    DAMAGE[damage](report)
    path = tmp_path / "report.json"
    path.write_text(json.dumps(report))
    assert main(["reproduce", "recall", "--mixers", "gla", "--seeds", "2", "--out", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert str(path) in err and err.count("\n") == 1
    assert json.loads(path.read_text()) == report


def test_a_report_that_is_cut_short_is_named_and_stays(given, tmp_path, capsys):
    given()
    reproduce.run("recall", mixers=["gla"], seeds=1, out=tmp_path)
    path = tmp_path / "report.json"
    path.write_bytes(half := path.read_bytes()[:300])
    assert main(["reproduce", "recall", "--out", str(tmp_path)]) == 2
    assert f"{path} is damaged, truncated or not JSON" in capsys.readouterr().err
    assert path.read_bytes() == half


def test_two_processes_never_write_to_one_folder(given, tmp_path, capsys):
    given()
    reproduce.run("recall", mixers=["gla"], seeds=1, out=tmp_path)
    before = (tmp_path / "report.json").read_bytes()
    with only_writer(tmp_path):
        assert main(["reproduce", "recall", "--out", str(tmp_path)]) == 2
        assert (tmp_path / "report.json").read_bytes() == before
    said = f"linattn: another process (pid {os.getpid()}) is writing to {tmp_path}: wait until it ends, or choose another folder\n"
    assert capsys.readouterr().err == said


def test_what_another_process_did_meanwhile_is_kept(given, tmp_path, monkeypatch):
    """Between the first read of the folder and the lock."""
    given()
    held = ledger.Folder.held

    def late(folder):
        monkeypatch.setattr(ledger.Folder, "held", held)
        reproduce.run("recall", mixers=["gla"], seeds=1, out=tmp_path)
        return held(folder)

    monkeypatch.setattr(ledger.Folder, "held", late)
    done = given()
    assert len(reproduce.run("recall", mixers=["gla", "softmax"], seeds=1, out=tmp_path)["runs"]) == len(done) == 5
