"""The GPU kernels without a GPU, in separate processes: tests under Triton's interpreter, and compilation for Hopper."""

import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

pytest.importorskip("triton")
ROOT = Path(__file__).parents[2]
FILES = sorted(path.name for path in (ROOT / "tests/ops/triton").glob("test_*.py"))
GROUPS = [FILES[i::2] for i in range(2)]  # one process each, since starting takes long
SHARED_MEMORY = {"hopper": 227 * 1024, "ampere": 99 * 1024}  # limit per program; higher on an A100


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    # Without the environment of xdist workers and coverage.
    kept = {n: x for n, x in os.environ.items() if not n.startswith(("PYTEST", "TRITON"))}
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, env={**kept, **threads, **environment}, capture_output=True, text=True)


def interpreted(files: list[str], which: str) -> tuple[int, str]:
    paths = [f"tests/ops/triton/{file}" for file in files]
    done = python("-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", which, *paths, TRITON_INTERPRET="1")
    return done.returncode, done.stdout[-6000:] + done.stderr[-2000:]


@pytest.mark.parametrize("files", GROUPS, ids=["1 of 2", "2 of 2"])  # ids without subjects, so that `pytest -k` does not select them
def test_interpreted(files):
    code, said = interpreted(files, "not slow")
    assert code == 0 and " passed" in said, said


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES)
def test_interpreted_at_length(file):
    code, said = interpreted([file], "slow")
    assert code in (0, pytest.ExitCode.NO_TESTS_COLLECTED), said


FAMILIES = list(product(("plain", "beta", "erase", "bonus"), ("none", "BTH", "BTHK")))


def compiled(tmp_path: Path, kind: str, rank: str, *words: str) -> list[dict]:
    """Compile the kernels of a forward and a backward pass over a split sequence; each fits shared memory."""
    done = python("-m", "tests.ops.triton.compiling", kind, rank, *words, TRITON_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr[-4000:]
    kernels = json.loads(done.stdout)
    wanted = (
        {"forward", "chain", "backward"}
        | ({"fold"} if "parts" in words else set())
        | ({"prepare"} if kind != "plain" or rank == "BTHK" else set())
    )
    if "busy" in words:
        wanted |= {"fused_channel", "gradients"} if rank == "BTHK" else {"fused"}
    elif (kind, rank) != ("plain", "none") or "wide" in words:  # whose gradients are the scans themselves
        wanted.add("gradients")
    if rank == "BTHK" and not {"gluon", "wide", "parts", "busy"} & set(words):  # the portable gradients' strong decays
        wanted.add("unsettled")
    assert {k["name"] for k in kernels} - {"shared"} == wanted
    for kernel in kernels:
        assert kernel["shared"] <= SHARED_MEMORY["ampere" if "ampere" in words else "hopper"], kernel
        assert kernel["tensor_cores"] or kernel["name"] in ("chain", "fold", "shared"), kernel
        assert not kernel["not_alone"], kernel  # see hopper.common.barriers
        assert not kernel["early"], kernel
        measured = kind == "plain" and kernel["name"] == "fused"  # known, see benchmarks/log.md
        own = kernel["module"].startswith("hopper.") and not measured
        assert not (kernel["serialized"] and own), kernel  # see hopper.operands.pinned
    return kernels


def test_an_early_arrival_is_found():
    from tests.ops.triton.compiling import early

    load, barrier, warp = "ld.shared.b32 %r1, [%r2];", "bar.sync 2, 128;", "bar.warp.sync -1;"
    arrival, awaited = "@%p1 mbarrier.arrive.shared::cta.b64 _, [%r3];", "@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r3], 64;"
    for fine in ((barrier, load, barrier, arrival), (load, warp, arrival), (load, awaited), (load, "barrier.sync 1;", arrival)):
        assert early("\n".join(fine)) == []
    assert early(f"{barrier}\n{load}\n{arrival}") == [f"{arrival} after {load}"]
    assert len(early(f"{barrier}\n{load}\n{warp}\n{arrival}")) == 1  # the warp is one of four


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "rank"), FAMILIES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_compiles_for_hopper(dtype, kind, rank, tmp_path):
    assert not any(k["module"].startswith("hopper.") for k in compiled(tmp_path, kind, rank, dtype))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "rank"), FAMILIES)
def test_the_largest_heads_fit_a_small_ampere(kind, rank, tmp_path):
    compiled(tmp_path, kind, rank, "bfloat16", "ampere")


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "rank"), FAMILIES)
def test_hoppers_own_kernels_take_wide_values_in_parts(kind, rank, tmp_path):
    """Gradients of what the parts share are summed."""
    kernels = compiled(tmp_path, kind, rank, "bfloat16", "wide")
    own = any(k["module"].startswith("hopper.gradients") for k in kernels)
    assert own == any(k["name"] == "shared" for k in kernels)
    assert own == (rank == "BTHK" or kind in ("plain", "beta"))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "rank"), [("plain", "BTH"), ("plain", "BTHK"), ("beta", "BTH"), ("beta", "none")])
def test_the_kernels_for_a_busy_hopper_compile(kind, rank, tmp_path):
    compiled(tmp_path, kind, rank, "bfloat16", "busy")


def test_the_trial_of_hoppers_own_kernels_compiles(tmp_path):
    done = python("-m", "tests.ops.triton.compiling", TRITON_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr[-4000:]
    (kernel,) = json.loads(done.stdout)
    assert not kernel["not_alone"] and not kernel["early"] and not kernel["spill_stores"] and not kernel["serialized"], kernel


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "rank"), [("plain", "BTHK"), ("beta", "BTH"), ("erase", "BTHK")])
def test_kernels_of_a_part_compile(kind, rank, tmp_path):
    modules = {k["module"] for k in compiled(tmp_path, kind, rank, "bfloat16", "parts")}
    assert {"state_fold", "hopper.forward", "hopper.backward"} <= modules


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "rank"), FAMILIES)
def test_hoppers_own_kernels_compile(kind, rank, tmp_path):
    """The scans are always used; kernels for preparation and gradients as in choice.py, three of them per channel, two with a bonus."""
    modules = [k["module"] for k in compiled(tmp_path, kind, rank, "bfloat16", "gluon")]
    wanted = {"hopper.forward", "hopper.backward"}
    if rank == "BTHK" or kind == "beta":
        wanted.add("hopper.prepare")
    if rank == "BTHK" or (kind in ("plain", "beta") and (kind, rank) != ("plain", "none")):
        wanted.add("hopper.gradients")
    assert {m for m in modules if m.startswith("hopper.")} == wanted
    launches = (2 if kind == "bonus" else 3) if rank == "BTHK" else 1
    assert modules.count("hopper.gradients") == launches * ("hopper.gradients" in wanted)
