import json
import math
import os
import re
import select
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from linattn import mixers, reproduce
from linattn.cli.main import main
from linattn.experiment import runner, workers
from linattn.experiment.study import Column, grouped, mean_and_spread
from linattn.mixers import registry
from linattn.reproduce import ledger, results, variants
from tests.reproduce import toy


def test_a_study_from_runs_to_page(given, tmp_path):
    done = given()
    report = reproduce.run("recall", out=tmp_path / "out")
    assert report == json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["complete"]
    assert len(done) == len(report["runs"]) == 9, "two mixers, sizes and seeds, and the one that these led to"
    assert {run["device"] for run in done} == {report["runs"][0]["run"]["device"]}
    first = report["rows"][0]
    assert first == {"mixer": "gla", "size": 4, "score": 4.5 / 32, "score_spread": pytest.approx(math.sqrt(0.5) / 32), "paper_says": "0.5",
                     "source": "a <paper>", "agrees": True}  # fmt: skip
    assert [c["key"] for c in report["columns"]] == ["mixer", "size", "score", "paper_says", "source", "agrees"]
    assert report["runs"][0]["result"]["loss"] is None, "JSON has no NaN"
    assert {"cpu", "torch", "linattn", "accelerator"} <= report["machines"][0].keys()
    assert report["command"] == f"linattn reproduce recall --quick --out {tmp_path / 'out'}"
    page = (tmp_path / "out" / "report.html").read_text()
    for said in (
        "<h1>A toy</h1>",
        ">yes<",
        ">是<",
        "论文的说法",
        "0.141 ± 0.022",
        "a &lt;paper&gt;",
        "A &lt;note&gt;.",
        "<svg",
        "9 of 9",
        "paper says",
    ):
        assert said in page
    assert "<note>" not in page
    assert '<td class="words">' not in page


def test_sentences_of_the_papers_are_broken_into_lines(given, tmp_path):
    """In one line they would push results off the page."""

    def rows(settings, done):
        return [{**row, "paper_says": "it learns all of it, and soon"} for row in toy.rows(settings, done)]

    given(rows=rows, columns=(*toy.study().columns, Column("nothing", "nothing")))
    reproduce.run("recall", mixers=["gla"], seeds=1, out=tmp_path)
    page = (tmp_path / "report.html").read_text()
    heads = re.findall(r'<th scope="col"([^>]*)><span lang="en">(.*?)</span>', page)
    assert (' class="words"', "paper says") in heads and ("", "source") in heads
    assert '<td>0.125</td><td class="words">it learns all of it, and soon</td><td>a &lt;paper&gt;</td>' in page
    assert ">nothing<" not in page, "an empty column takes no place"


def test_what_was_cut_off_goes_on_where_it_was(given, tmp_path):
    done = given()

    def interrupted(run):
        if len(done) == 3:
            raise KeyboardInterrupt
        done.append(run)
        return toy.measure(run)

    given(measure=interrupted)
    with pytest.raises(KeyboardInterrupt):
        reproduce.run("recall", out=tmp_path)
    report = json.loads((tmp_path / "report.json").read_text())
    assert not report["complete"]
    assert [entry["run"] for entry in report["runs"]] == done
    assert len(report["rows"]) == 2, "there is a table of what there is"
    assert "3 of 8 runs are done" in (tmp_path / "report.html").read_text()
    after = given()
    assert reproduce.run("recall", out=tmp_path)["complete"]
    assert len(after) == 6
    assert not [run for run in after if run in done]
    again = given()
    assert reproduce.run("recall", out=tmp_path)["complete"]
    assert again == []


def test_every_run_is_on_disk_before_the_next(given, tmp_path):
    saved = []

    def measure(run):
        saved.append(len(json.loads((tmp_path / "report.json").read_text())["runs"]))
        return toy.measure(run)

    given(measure=measure)
    reproduce.run("recall", out=tmp_path)
    assert saved == list(range(9))


def test_the_table_of_what_was_there_is_on_disk_while_more_is_done(given, tmp_path):
    """A killed process cannot write one."""
    given()
    before = reproduce.run("recall", mixers=["gla", "lstm"], seeds=1, out=tmp_path)
    saved = []

    def measure(run):
        saved.append(json.loads((tmp_path / "report.json").read_text()))
        return toy.measure(run)

    given(measure=measure)
    reproduce.run("recall", mixers=["gla", "lstm"], seeds=2, out=tmp_path)
    kept = ("columns", "left_out")
    assert {key: saved[0][key] for key in kept} == {key: before[key] for key in kept}
    assert [row["score"] for row in saved[0]["rows"]] == [4 / 32, 8 / 32]


def test_a_run_knows_its_machine(given, tmp_path, monkeypatch):
    given()
    first = reproduce.run("recall", mixers=["gla"], seeds=1, out=tmp_path)
    monkeypatch.setattr(ledger, "machine", lambda: {**first["machines"][0], "cpu": "Another"})
    assert reproduce.run("recall", mixers=["gla"], seeds=1, out=tmp_path)["machines"] == first["machines"], "it did nothing"
    report = reproduce.run("recall", mixers=["gla"], seeds=2, out=tmp_path)
    assert [m["cpu"] for m in report["machines"]] == [first["machines"][0]["cpu"], "Another"]
    assert {entry["run"]["seed"]: entry["machine"] for entry in report["runs"] if not entry["run"]["again"]} == {0: 0, 1: 1}


def test_other_settings_are_other_runs_and_lose_none(given, tmp_path):
    given()
    reproduce.run("recall", mixers=["gla"], seeds=1, out=tmp_path)
    done = given()
    report = reproduce.run("recall", mixers=["deltanet:negative_eigenvalues=true"], seeds=1, out=tmp_path)
    assert {run["mixer"] for run in done} == {"deltanet:negative_eigenvalues=true"}
    assert {row["mixer"] for row in report["rows"]} == {"deltanet:negative_eigenvalues=true"}
    assert len(report["runs"]) == 6
    both = given()
    assert {r["mixer"] for r in reproduce.run("recall", full=True, mixers=["gla"], seeds=1, out=tmp_path)["rows"]} == {"gla"}
    assert [run["size"] for run in both] == [12], "of the full sizes one is new"


def test_minutes_end_it_between_two_runs(given, tmp_path, monkeypatch):
    clock = iter(range(0, 10_000, 25))
    monkeypatch.setattr(runner.time, "monotonic", lambda: next(clock))
    done = given()
    report = reproduce.run("recall", minutes=1.5, out=tmp_path)
    assert 0 < len(done) < 8
    assert not report["complete"]


def test_what_cannot_be_measured_is_said_and_what_fails_is_tried_again(given, tmp_path):
    given()
    report = reproduce.run("recall", mixers=["lstm", "gru", "gla"], seeds=1, out=tmp_path)
    assert [x["reason"] for x in report["left_out"]] == ["it is too <long>"] * 2
    assert [x["error"] for x in report["failures"]] == ["ZeroDivisionError: a bug"] * 2
    assert {row["mixer"] for row in report["rows"]} == {"gla"}
    assert not report["complete"]
    page = (tmp_path / "report.html").read_text()
    assert page.count('<li lang="en">Left out: lstm, 2 runs: it is too &lt;long&gt;</li>') == 1
    assert "ZeroDivisionError" in page
    done = given()
    assert len(reproduce.run("recall", mixers=["lstm", "gru", "gla"], seeds=1, out=tmp_path)["failures"]) == 2
    assert {run["mixer"] for run in done} == {"gru"}


def test_processes_do_what_this_one_would(monkeypatch, tmp_path):
    study = toy.study(alone=False)
    monkeypatch.setattr(ledger, "load", lambda name: study)
    report = reproduce.run("recall", mixers=["gla", "gru"], seeds=1, out=tmp_path)
    assert [row["score"] for row in report["rows"]] == [4 / 32, 8 / 32]
    assert len(report["failures"]) == 2
    assert os.getpid() not in {entry["result"]["process"] for entry in report["runs"]}


def test_a_mixer_of_a_notebook_stays_in_its_process(monkeypatch, tmp_path):
    monkeypatch.setattr(ledger, "load", lambda name: toy.study(alone=False))
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))
    monkeypatch.setitem(registry._registered, "of_a_cell", replace(mixers.info("gla"), cls=type("Cell", (), {"__module__": "__main__"})))
    report = reproduce.run("recall", mixers=["of_a_cell"], seeds=1, out=tmp_path)
    assert report["complete"]
    assert {entry["result"]["process"] for entry in report["runs"]} == {os.getpid()}


def test_a_process_that_lost_its_device_makes_room_for_another(monkeypatch, tmp_path):
    """It finishes its current runs only."""
    study = toy.study(alone=False)
    monkeypatch.setattr(ledger, "load", lambda name: study)
    monkeypatch.setattr(workers, "cores", lambda: 1)
    report = reproduce.run("recall", mixers=["softmax", "rwkv7", "gla"], seeds=1, out=tmp_path)
    assert [x["error"] for x in report["failures"]] == ["RuntimeError: an illegal memory access"] * 2
    score = {(row["mixer"], row["size"]): row["score"] for row in report["rows"]}
    assert score == {(mixer, size): size / 32 for mixer in ("softmax", "gla") for size in (4, 8)}
    assert len({entry["result"]["process"] for entry in report["runs"]}) == 2, "before and after both failures"


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs Linux")
def test_processes_end_with_the_one_that_started_them(tmp_path):
    """Even if it is killed."""
    (script := tmp_path / "parent.py").write_text("""
import multiprocessing, os
from linattn.experiment import workers
from tests.reproduce import toy
if __name__ == "__main__":  # the spawned process reads this file, too
    runs = workers._in_processes(toy.measure, iter([{"mixer": "gla", "size": 4, "seed": 0}] * 9), 1, 1)
    assert next(runs).result["score"] == 4 / 32
    print(multiprocessing.active_children()[0].pid, flush=True)
    input()
    os._exit(0)
""")
    root = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])}
    with subprocess.Popen([sys.executable, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=root) as parent:
        worker = os.pidfd_open(int(parent.stdout.readline()))
        parent.stdin.write("now\n")
        parent.stdin.flush()
        parent.wait(60)
        try:
            assert select.select([worker], [], [], 60)[0], "it waits for a parent that is no more"
        finally:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(worker, signal.SIGKILL)
            os.close(worker)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"study": "recal"}, "study must be one of recall, capacity"),
        ({"mixers": []}, "mixers must name"),
        ({"mixers": ["gla", "gla"]}, "gla came more than once"),
        ({"mixers": "gla"}, "mixers must be a list of names, but came as 'gla'"),
        ({"mixers": ["gla", 1]}, r"mixers must be a list of names, but came as \['gla', 1\]"),
        ({"mixers": 3}, "mixers must be a list of names, but came as 3"),
        ({"mixers": ["glaa"]}, "did you mean 'gla'"),
        ({"mixers": ["gla:heds=4"]}, "no option 'heds'"),
        ({"mixers": ["gla:heads"]}, "name:option=value"),
        ({"mixers": ["gla:heads=two"]}, "heads of mixer 'gla' must be int, but came as 'two'"),
        ({"mixers": ["rwkv7:rank=x"]}, "rank of mixer 'rwkv7' must be int .* but came as 'x'"),
        ({"mixers": ["gla:heads=true"]}, "heads of mixer 'gla' must be int, but came as 'true'"),
        ({"mixers": ["softmax:window=1.5"]}, "window of mixer 'softmax' must be int | None, but came as '1.5'".replace("|", r"\|")),
        ({"mixers": ["softmax:window=0"]}, "softmax:window=0 cannot be a mixer of width 32: window must be at least 1 token"),
        ({"study": "capacity", "mixers": ["softmax:window=0"]}, "softmax:window=0 cannot be a mixer of width 64: window must be at"),
        ({"study": "copying", "mixers": ["gla", "gla:heads=5"]}, "gla:heads=5 cannot be a mixer of width 64: .* came as 32 with 5 heads"),
        ({"study": "precision", "mixers": ["mamba2:state_size=0"]}, "mamba2:state_size=0 cannot be a mixer of width 64: state_size must"),
        ({"seeds": 0}, "seeds must be an integer of at least 1, but came as 0"),
        ({"seeds": 1.5}, "seeds must be an integer of at least 1, but came as 1.5"),
        ({"seeds": "3"}, "seeds must be an integer of at least 1, but came as '3'"),
        ({"minutes": 0}, "minutes must be a number above 0"),
        ({"minutes": float("nan")}, "minutes must be a number above 0, but came as nan"),
        ({"minutes": "3"}, "minutes must be a number above 0, but came as '3'"),
    ],
)
def test_bad_input_leaves_nothing_behind(options, says, tmp_path):
    with pytest.raises(ValueError, match=says):
        reproduce.run(**{"study": "recall", "out": tmp_path / "out", **options})
    assert not (tmp_path / "out").exists()


def test_the_command_line(given, tmp_path, capsys):
    given()
    assert main(["reproduce", "recall", "--mixers", "gla,softmax:window=4", "--seeds", "1", "--out", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert lines[0].split("\t") == ["mixer", "size", "score", "score_spread", "paper_says", "source", "agrees"]
    assert lines[1].split("\t") == ["gla", "4", "0.125", "-", "0.5", "a <paper>", "True"]
    assert lines[-1] == f"report: {tmp_path / 'report.html'}"
    assert "recall: 1 of 4: gla 0: " in err
    done = given(runs=lambda settings, done: [{"mixer": m, "size": 4, "seed": 0} for m in settings.mixers])
    assert main(["reproduce", "recall", "--mixers", "all", "--out", str(tmp_path / "all")]) == 1, "of the toy's two that fail"
    assert [run["mixer"] for run in done] == list(variants.everyone())
    assert {"gla", "softmax", "slstm", "titans", "path"} <= set(variants.everyone())
    capsys.readouterr()
    given()
    assert main(["reproduce", "recall", "--mixers", "gru,lstm", "--seeds", "1", "--out", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "incomplete" in out
    assert out.count("left out: lstm, 2 runs: it is too <long>\n") == 1
    assert main(["reproduce", "recall", "--quick", "--full"]) == 2
    assert "exclude each other" in capsys.readouterr().err
    assert main(["reproduce", "moons"]) == 2


def test_variants():
    one = variants.parse("softmax:window=16:heads=2")
    assert (one.name, one.options, one.label) == ("softmax", {"window": 16, "heads": 2}, "softmax window 16 heads 2")
    assert variants.parse("performer:kernel=relu").options == {"kernel": "relu"}
    one = variants.parse("deltanet:conv_width=1:negative_eigenvalues=true")
    assert one.options == {"conv_width": 1, "negative_eigenvalues": True}
    assert one.label == "deltanet β<2"
    assert variants.parse("softmax:window=null").options == {"window": None}
    assert variants.parse("gla:key_ratio=1").options == {"key_ratio": 1}
    assert variants.parse("longformer:dilations=[1,2]").options == {"dilations": [1, 2]}


def test_every_mixer_is_one_that_can_be_named():
    for name in variants.everyone():
        assert variants.parse(name).name == name
    assert variants.label("deltanet:negative_eigenvalues=true") == "deltanet β<2"
    assert variants.label("a rule of a study") == "a rule of a study"


def test_a_system_finds_what_was_measured_of_it(given, tmp_path):
    given(columns=(*toy.study().columns, Column("nothing", "nothing")))
    reproduce.run("recall", mixers=["gla:heads=2", "gla", "softmax:window=4"], seeds=2, out=tmp_path)
    report = json.loads((tmp_path / "report.json").read_text())
    heads, rows = results.of(report, "gla")
    assert heads == ["mixer", "size", "score", "paper says", "source", "so here"]
    assert [row[:3] for row in rows] == [
        ["gla heads 2", "4", "0.141 ± 0.022"], ["gla heads 2", "8", "0.266 ± 0.022"], ["gla", "4", "0.141 ± 0.022"],
        ["gla", "8", "0.266 ± 0.022"], ["gla heads 2", "16", "0.500"],
    ]  # fmt: skip
    assert rows[0][3:] == ["0.5", "a <paper>", "yes"]
    assert results.of(report, "softmax")[1][0][0] == "softmax window 4"
    assert results.of(report, "deltanet") == ([], [])
    with pytest.raises(ValueError, match="one of recall, .*, but says 'os'"):
        results.of({**report, "study": "os"}, "gla")


def test_figures_over_seeds():
    assert mean_and_spread("x", [1.0, 3.0]) == {"x": 2.0, "x_spread": pytest.approx(math.sqrt(2))}
    assert mean_and_spread("x", [1.0, None]) == {"x": 1.0, "x_spread": None}
    assert mean_and_spread("x", []) == {"x": None, "x_spread": None}
    groups = grouped([({"m": "a", "s": [1]}, {"v": 1}), ({"m": "a", "s": [1]}, {"left_out": "no"})], "m", "s")
    assert groups == {("a", (1,)): [({"m": "a", "s": [1]}, {"v": 1})]}
    column = Column("x", "x", "{:.1f}".format, spread=True)
    assert [column.cell(row) for row in ({"x": 2.0, "x_spread": 0.5}, {"x": 2.0, "x_spread": None}, {})] == ["2.0 ± 0.5", "2.0", "–"]
