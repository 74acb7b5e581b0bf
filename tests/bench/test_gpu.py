"""The GPU benchmarks without a GPU: plan, workers, records, and robustness to failures."""

import importlib.util
import json
import re
import shlex
import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import linattn
import linattn.bench.gpu.ops as gpu_ops
from linattn.bench.files import command, file_for
from linattn.bench.gpu import libraries, train
from linattn.bench.gpu.cases import DECODE, FAMILIES, FIRST, FIRST_SHAPE, MODES, PASSES, SHAPES, STEPS, TINY, Case, Shape, plan, tensors
from linattn.bench.gpu.ops import KEY, Request
from linattn.bench.gpu.record import Record
from linattn.bench.gpu.worker import Failure, Worker
from linattn.cli.main import main
from tests.bench import calls

ROOT = Path(__file__).parents[2]
ABOUT = {"card": "NVIDIA H200", "torch": "2.11", "triton": "3.6"}


def test_every_family_meets_every_shape_in_both_passes_and_no_case_comes_twice():
    cases = [case for case, _ in plan(quick=False, device="cuda")]
    assert len(set(cases)) == len(cases)
    assert {Case.of(f, s, mode) for f in FAMILIES for s in SHAPES for mode in PASSES} <= set(cases)
    assert max(case.shape.T for case in cases) == 1 << 20
    assert all(case.shape == FIRST_SHAPE for case in cases[: 2 * len(FAMILIES)]), "what matters most comes first"


@pytest.mark.parametrize("family", FAMILIES)
def test_ours_runs_what_the_plan_gives_it(family):
    case = Case.of(family, TINY[1], "forward")
    if family == "softmax":
        assert not libraries.takes("linattn", case) and libraries.takes("torch", case)
        return
    x = tensors(case, "cpu", 0)
    assert libraries.ours(x).shape == x[{"scan": "b", "selective_scan": "x"}.get(family, "v")].shape
    if case.decay is not None:
        assert x["decay"].dtype == getattr(torch, case.decay_dtype)
        assert x["decay"].float().mean().item() == pytest.approx(case.decay, rel=0.2) and x["decay"].max() <= 0


@pytest.mark.parametrize("family", STEPS)
def test_a_step_has_a_state(family):
    x = tensors(Case.of(family, replace(TINY[0], T=1), DECODE[0]), "cpu", 0)
    assert libraries.ours(x)[1].shape == x["state"].shape


def test_fla_has_a_call_for_every_recurrence():
    assert set(libraries.FLA_CALLS) == set(FAMILIES) - {"softmax", "selective_scan"} and set(libraries.FLA_STEPS) == set(STEPS)


def test_mambas_scan_meets_ours_in_its_own_layout(monkeypatch):
    from transformers.models.mamba.modeling_mamba import mamba_selective_scan

    def theirs(u, delta, A, B, C):
        assert all(t.is_contiguous() for t in (u, delta, B, C)), "it would be timed with a copy"
        return mamba_selective_scan(u, delta, A, B, C, torch.zeros(A.shape[0]))

    for name in ("mamba_ssm", "mamba_ssm.ops", "mamba_ssm.ops.selective_scan_interface"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setattr(sys.modules["mamba_ssm.ops.selective_scan_interface"], "selective_scan_fn", theirs, raising=False)
    case = Case.of("selective_scan", TINY[1], "forward")
    assert libraries.takes("mamba-ssm", case) and libraries.same("mamba-ssm", case) and not libraries.takes("fla", case)
    x = {name: t.float() for name, t in tensors(case, "cpu", 0).items()}
    out = libraries.LIBRARIES["mamba-ssm"](case)(libraries.laid_out("mamba-ssm", case, x))
    torch.testing.assert_close(out, libraries.ours(x))


def test_flash_qla_meets_ours_in_its_own_words(monkeypatch):
    """Keywords match its signature; it supports only the gated delta rule with heads of 128 channels."""

    def theirs(q, k, v, g, beta, scale=None):
        return linattn.linear_attention(q, k, v, decay=g, beta=beta, scale=scale), None

    monkeypatch.setitem(sys.modules, "flash_qla", types.ModuleType("flash_qla"))
    monkeypatch.setattr(sys.modules["flash_qla"], "chunk_gated_delta_rule", theirs, raising=False)
    case = Case.of("gated_delta", Shape(1, 64, 1, 128), "forward")
    x = tensors(case, "cpu", 0)
    torch.testing.assert_close(libraries.LIBRARIES["flash-qla"](case)(x), libraries.ours(x))
    assert libraries.takes("flash-qla", case) and libraries.same("flash-qla", case)
    for other in (Case.of("kda", Shape(1, 64, 1, 128), "forward"), Case.of("gated_delta", Shape(1, 64, 1, 64), "forward")):
        assert not libraries.takes("flash-qla", other) and libraries.LIBRARIES["flash-qla"](other) is None


def test_a_peer_that_does_not_load_is_named_with_the_reason(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(libraries.wheels, "path", lambda requirement: (_ for _ in ()).throw(OSError(f"{requirement} is not there")))
    monkeypatch.setattr(libraries, "FLA", ("fla-core==0.6.0",))
    found = libraries.find("flash-qla", "cuda")
    assert found.startswith("flash-qla==0.1.3 is not there") and str(libraries.wheels.folder()) in found
    gpu_ops.run(Request(quick=True, peers=("flash_qla", "mamba_ssm"), families=("none",), seconds=0.001), device="cpu")
    assert "without flash-qla: it runs on a GPU only" in capsys.readouterr().err


def test_a_shape_can_be_typed():
    assert Shape.parse("b1 t32768 h16 d128") == FIRST_SHAPE == Shape.parse(str(FIRST_SHAPE))


def test_a_wish_narrows_the_plan_and_adds_shapes():
    request = Request(families=("gla",))
    with pytest.raises(ValueError, match=r"--families must be among none, .* but has gla"):
        request.check()
    only = [case for case, _ in Request(families=("kda",), shapes=("B2T100H4D64",), modes=("forward",)).cases("cuda")]
    assert only == [Case.of("kda", Shape(2, 100, 4, 64), "forward")]
    peers = {with_peers for case, with_peers in Request(modes=(FIRST,)).cases("cuda")}
    assert peers == {True}, "asked for by name, a first call is every library's"


def test_a_worker_survives_what_it_runs():
    with Worker(environment={"LINATTN_TEST_PLACE": "apart"}) as worker:
        first, place = worker.call(calls.place, timeout=60)
        assert place == "apart" and worker.call(calls.add, 1, 2, timeout=60) == 3
        for call, kind, says, seconds in (
            (calls.refuse, "refuses", "RuntimeError: not on this card", 60),
            (calls.die, "crashed", "exit code 7", 60),
            (calls.sleep, "timed out", "after 1 s", 1),
        ):
            with pytest.raises(Failure, match=says) as failure:
                worker.call(call, timeout=seconds)
            assert failure.value.kind == kind
            after = worker.call(calls.place, timeout=60)[0]
            assert (after == first) == (kind == "refuses"), "a process that still works is kept"
            first = after


def test_a_file_takes_the_rows_of_several_runs(tmp_path):
    path = file_for(tmp_path, "ops", "NVIDIA H100 80GB HBM3")
    assert path.name == "ops-h100-80gb-hbm3.json" and file_for(path, "ops", "cpu") == path
    for ms, families in ((1.0, "ab"), (2.0, "bc"), (3.0, "c")):
        with Record(path, ("family",), ABOUT) as record:
            for family in families:
                record.add({"family": family, "ms": ms})
    body = json.loads(path.read_text())
    assert {row["family"]: row["ms"] for row in body["rows"]} == {"a": 1.0, "b": 2.0, "c": 3.0}
    assert len(body["runs"]) == 3
    with Record(path, ("family",), ABOUT) as record:
        for family in "abc":
            record.add({"family": family, "ms": 4.0})
    body = json.loads(path.read_text())
    assert len(body["runs"]) == 1 and {row["run"] for row in body["rows"]} == {0}, "a run without rows is forgotten"
    with pytest.raises(ValueError, match="other figures than those of cpu"):
        Record(path, ("family",), {"card": "cpu"})


@pytest.mark.parametrize("change", [{"rows": 3}, {"rows": [1]}, {"runs": None}, {"runs": []}, None])
def test_a_damaged_file_is_named_and_stays(tmp_path, change):
    path = tmp_path / "ops.json"
    with Record(path, ("family",), ABOUT) as record:
        record.add({"family": "a", "ms": 1.0})
    path.write_text("{" if change is None else json.dumps({**json.loads(path.read_text()), **change}))
    before = path.read_bytes()
    with pytest.raises(ValueError, match=r"ops\.json is damaged"):
        Record(path, ("family",), ABOUT)
    assert path.read_bytes() == before


def test_a_run_keeps_what_fails_beside_what_works(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu_ops, "measure", _measure)
    gpu_ops.run(Request(quick=True, families=("none", "delta"), modes=("forward", *DECODE)), device="cpu", out=tmp_path)
    rows = {(r["family"], r["mode"]): r for r in json.loads((tmp_path / "ops-cpu.json").read_text())["rows"]}
    assert rows["none", "forward"]["failure"] == "crashed" and rows["none", "forward"]["ms"] is None
    assert rows["delta", "forward"]["ms"] == 1.5 and len(rows) == 4
    assert "4/4" in capsys.readouterr().err


def _measure(library, case, device, seconds, check):
    if case.family == "none":
        calls.die()
    return {"ms": 1.5}


def test_real_figures_come_from_a_cpu_too(tmp_path):
    gpu_ops.run(Request(quick=True, families=("head", "softmax")), device="cpu", out=tmp_path / "few.json")
    body = json.loads((tmp_path / "few.json").read_text())
    assert all(row["ms"] > 0 for row in body["rows"]) and {row["library"] for row in body["rows"]} == {"linattn", "torch"}


def test_no_time_is_no_figure(tmp_path, capsys):
    gpu_ops.run(Request(quick=True, families=("head",), seconds=0.0), device="cpu", out=tmp_path / "none.json")
    assert json.loads((tmp_path / "none.json").read_text())["rows"] == [] and "missing" in capsys.readouterr().err


def test_a_model_trains(tmp_path):
    train.run(quick=True, device="cpu", models=("gla", "llama"), out=tmp_path / "train.json")
    rows = json.loads((tmp_path / "train.json").read_text())["rows"]
    assert [(row["library"], row["model"]) for row in rows] == [("linattn", "gla"), ("transformers", "llama")]
    assert all(row["tokens_per_second"] > 0 for row in rows)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["ops", "--device", "cpu", "--families", "none"], "--families cannot be used with ops on cpu"),
        (["ops", "--device", "cpu", "--models", "gla"], "--models cannot be used"),
        (["train", "--device", "cpu", "--shapes", "B1T1H1D1"], "--shapes cannot be used with train"),
        (["train", "--device", "cpu", "--models", "gal"], "--models must be among"),
        (["train", "--device", "cpu", "--peers", "torch"], "--peers cannot be used with train on cpu"),
        (["ops", "--device", "cuda", "--shapes", "1x2"], "--shapes must be like"),
        (["ops", "--device", "cuda", "--shapes", "B1T0H1D64"], "--shapes must be like"),
        pytest.param(
            ["ops", "--device", "cuda"], "torch sees none", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="it has a GPU")
        ),
        (["ops", "--device", "cuda", "--peers", "flash"], "--peers must be among torch, fla, mamba-ssm, flash-qla"),
    ],
)
def test_the_command_line_refuses_in_one_line(args, says, capsys):
    assert main(["bench", *args]) == 2
    err = capsys.readouterr().err
    assert says in err and err.count("\n") == 1


def test_the_modes_that_help_names_are_modes(capsys):
    assert main(["bench", "--help"]) == 0
    (said,) = re.findall(r"On a GPU: only these, such as (.*?)\.", re.sub(r"[\s│]+", " ", capsys.readouterr().out))
    named = re.findall(r'"(.*?)"', said)
    assert len(named) == 2 and set(named) <= set(MODES)


def test_the_command_of_a_file_can_be_typed_again():
    """As parsed by a shell, without the output path."""
    given = ["bench", "ops", "--peers", "", "--modes", "forward in a graph,decode", "--out", "some where/x.json", "--seconds", "3"]
    kept = given[:6] + given[8:]
    assert shlex.split(command("linattn", given)) == shlex.split(command("linattn", [*kept, "--out=x y"])) == ["linattn", *kept]


@pytest.fixture
def tables():
    spec = importlib.util.spec_from_file_location("benchmark_tables", ROOT / "benchmarks" / "tables.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["README.md", "README.zh.md"])
def test_a_table_is_made_of_a_cards_figures_and_of_nothing_else(tables, name, tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    results = tmp_path / "benchmarks" / "results"
    results.mkdir(parents=True)
    marks = "A\n<!-- from benchmarks/results/{}.json -->\nold\n<!-- end -->\nB\n"
    (tmp_path / name).write_text(marks.format("ops-h200") + marks.format("train-h200"), encoding="utf-8")
    assert "|" not in tables.filled(name) and "old" not in tables.filled(name)
    empty = {"version": "1", "peak_mb": None, "warm_ms": None, "difference": None}
    with Record(results / "ops-h200.json", KEY, ABOUT) as record:
        for library, mode, more in (
            ("linattn", "forward", {"ms": 0.261}),
            ("fla", "forward", {"ms": 0.532}),
            ("linattn", "forward+backward", {"ms": 0.8, "peak_mb": 600.0}),
            ("fla", "forward+backward", {"ms": None, "failure": "refuses", "message": "Triton"}),
        ):
            case = Case.of("head", FIRST_SHAPE, mode)
            record.add({"library": library, **vars(case), "shape": str(case.shape), **empty, **more})
    with Record(results / "train-h200.json", train.KEY, ABOUT) as record:
        figures = {"tokens_per_second": 210000.4, "first_step_s": 40.2, "peak_gb": 20.25, "parameters": 374e6}
        record.add({"library": "linattn", "model": "gla", "compiled": True, **figures})
    text = tables.filled(name)
    forward, both, refuses = {"README.md": ("forward", "forward+backward", "refuses"), "README.zh.md": ("前向", "前向+反向", "拒绝")}[name]
    assert f"| head | {forward} | 0.26 · 0.53 |  |" in text
    assert f"| head | {both} | 0.80 · {refuses} |" in text and f"600 · {refuses}" in text
    assert "NVIDIA H200" in text and "| none |" not in text
    assert "| linattn gla | – | 210,000 | 40 | 20.2 | 374 |" in text


def test_peers_of_training_are_known():
    with pytest.raises(ValueError, match="--peers must be among transformers, fla, but has torch"):
        train.run(quick=True, device="cpu", peers=("torch",))
