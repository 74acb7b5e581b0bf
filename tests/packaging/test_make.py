"""Setup by make: choice of the interpreter, the message without one, and no use of incomplete environments."""

import os
import re
import stat
import subprocess
import sys

import pytest

from tests.packaging.tree import ROOT

# A fake Python 3.11 that creates a venv of itself and logs calls of pip; pip fails while ./cut exists.
STUB = """#!/bin/sh
case "$*" in
  *"-m venv"*) shift 2; mkdir -p "$1/bin"; cp "$0" "$1/bin/python"; echo venv >> "$LOG" ;;
  *"pip --version"*) exit 0 ;;
  *install*) echo "$*" >> "$LOG"; case "$*" in *require-hashes*) test ! -e "$CUT" ;; esac ;;
esac
"""

OUTER = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "PYTHON", "TORCH_INDEX", "DEMO_ARGS", "TEST_ARGS")
ENVIRONMENT = {name: value for name, value in os.environ.items() if name not in OUTER}  # `make test` must not leak into the make it tests


@pytest.fixture
def shell(tmp_path):
    python = tmp_path / "python"
    python.write_text(STUB)
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    log, cut = tmp_path / "log", tmp_path / "cut"

    def run(**variables) -> tuple[int, str, str]:
        env = {**ENVIRONMENT, "PYTHON": str(python), "LOG": str(log), "CUT": str(cut), "TORCH_INDEX": "", **variables}
        done = subprocess.run(["sh", ".ci/venv", str(tmp_path / "venv")], cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)
        asked = log.read_text() if log.exists() else ""
        log.unlink(missing_ok=True)
        return done.returncode, asked, done.stderr

    return run


def test_torch_comes_first_unhashed_then_the_lock_then_the_package(shell, tmp_path):
    code, asked, _ = shell()
    made, torch, lock, package = asked.splitlines()
    assert code == 0 and made == "venv" and not (tmp_path / "venv" / ".installing").exists()
    assert torch.endswith(" torch==2.13.0") and "index" not in torch
    assert "--require-hashes --no-deps" in lock and "--no-deps --no-build-isolation --editable ." in package


def test_the_index_of_torch_can_be_chosen(shell):
    _, asked, _ = shell(TORCH_INDEX="file:///wheels")
    assert "--index-url file:///wheels torch==2.13.0" in asked.splitlines()[1]
    assert asked.count("file:///wheels") == 1


def test_an_interrupted_installation_is_made_anew(shell, tmp_path):
    (tmp_path / "cut").touch()
    assert shell()[0] != 0
    assert (tmp_path / "venv" / ".installing").exists()
    leftover = tmp_path / "venv" / "half"
    leftover.touch()
    (tmp_path / "cut").unlink()
    code, asked, _ = shell()
    assert code == 0 and asked.startswith("venv\n") and not leftover.exists()


def test_a_changed_lock_is_installed_into_the_venv_that_is_there(shell, tmp_path):
    shell()
    (tmp_path / "venv" / ".ready-1").touch()
    code, asked, _ = shell()
    assert code == 0 and "venv\n" not in asked and "--require-hashes" in asked
    assert not list((tmp_path / "venv").glob(".ready-*"))


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        ("exit 127", "Python 3.11 or newer is needed"),
        ('case "$*" in *ensurepip*) exit 1;; esac', "install its venv module"),
    ],
    ids=["none", "no venv"],
)
def test_what_is_missing_is_said_in_one_line(shell, tmp_path, body, wanted):
    (tmp_path / "other").write_text(f"#!/bin/sh\n{body}\n")
    (tmp_path / "other").chmod(0o755)
    code, asked, said = shell(PYTHON=str(tmp_path / "other"))
    assert code != 0 and asked == "" and not (tmp_path / "venv").exists()
    assert len(said.splitlines()) == 1 and wanted in said and "apt install" in said


def make(*arguments) -> str:
    done = subprocess.run(
        ["make", "--no-print-directory", *arguments], cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_help_is_what_make_alone_says():
    assert make() == make("help")
    for target in ("demo", "test", "test-all", "test-gpu", "test-machines", "docs", "lock", "clean"):
        assert f"make {target} " in make("help")


def test_the_gpu_suite_runs_in_the_interpreter_it_is_given():
    parallel = subprocess.run(["python3", "-c", "import xdist"], capture_output=True).returncode == 0
    made = make("-n", "test-gpu", "PYTHON=python3", "WORKERS=3").strip()
    assert made == "python3 -m pytest -m gpu -p no:benchmark" + " -n 3 --dist worksteal" * parallel


@pytest.mark.parametrize("fails", [None, "ruff check", "mypy", "pytest"])
def test_the_tests_fail_with_the_type_checker_that_runs_beside_them(tmp_path, fails):
    (tmp_path / "Makefile").write_text((ROOT / "Makefile").read_text())
    for name in ("requirements.lock", "pyproject.toml", ".ci/venv", ".venv/bin/python", ".venv/bin/ruff", ".venv/bin/mypy"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('#!/bin/sh\necho "${0##*/} $*"\ncase "${0##*/} $*" in *"$FAILS"*) exit 1;; esac\n')
        path.chmod(0o755)
    how = {"cwd": tmp_path, "env": {**ENVIRONMENT, "FAILS": fails or "nothing"}, "capture_output": True, "text": True, "timeout": 60}
    subprocess.run(["make", "--eval", "ready: ; touch $(READY)", "ready"], check=True, **how)
    done = subprocess.run(["make", "--no-print-directory", "test"], **how)
    assert (done.returncode != 0) == (fails is not None), done.stderr
    said = [line.split()[0] for line in done.stdout.splitlines() if line.startswith(("ruff ", "python -m pytest", "mypy "))]
    assert said == (["ruff"] if fails == "ruff check" else ["ruff", "ruff", "python", "mypy"])


@pytest.mark.slow
def test_durations_of_an_earlier_run_are_no_place_of_tests(tmp_path):
    """pytest finds the option in the conftest even without test paths."""
    kept = tmp_path / "durations.json"
    kept.touch()
    makefile = (ROOT / "Makefile").read_text()
    (option,) = re.findall(r"^DURATIONS := (.*)$", makefile, re.M)
    words = [word.replace("build/durations.json", str(kept)) for word in option.split()]
    run = subprocess.run([sys.executable, "-m", "pytest", *words, "--markers"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


def test_the_continuous_check_can_be_run():
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


@pytest.mark.parametrize("serve", [False, True])
@pytest.mark.parametrize("fails", [None, "test", "test-machines", "test-slow", "test-arm", "test-serve", "demo"])
def test_the_continuous_check_fails_with_either_and_ends_with_the_count(tmp_path, fails, serve):
    (tmp_path / ".ci").mkdir()
    script = tmp_path / ".ci" / "run"
    script.write_text((ROOT / ".ci" / "run").read_text())
    count = "===== 7 passed, 1 skipped in 3.21s ====="
    rules = {"test": f"echo '{count}'", "test-machines": "echo '$(MACHINES_ARGS)'", "test-slow": "echo slow"}
    rules |= {
        "emulator": "true",
        "test-arm": "echo arm",
        "venv-serve": "true" if serve else "false",
        "test-serve": "echo serve",
        "demo": "echo '$(DEMO_ARGS)'",
    }
    (tmp_path / "Makefile").write_text("".join(f"{target}:\n\t@{'false' if target == fails else rule}\n" for target, rule in rules.items()))
    done = subprocess.run(["bash", script], env=ENVIRONMENT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
    assert serve or fails or "DID NOT RUN" in done.stderr
    said = [line for line in done.stdout.splitlines() if not line.startswith("make")]
    wanted = {"test": [count], "test-machines": ["--slice"], "test-slow": ["slow"], "test-arm": ["arm"]}
    wanted |= ({"test-serve": ["serve"]} if serve else {}) | {"demo": ["--quick --steps 12"]}
    fails = fails if fails in wanted else None
    before = [line for target in list(wanted)[: None if fails is None else list(wanted).index(fails)] for line in wanted[target]]
    assert (done.returncode == 0) == (fails is None)
    assert said == (before if fails else [*before, count])
