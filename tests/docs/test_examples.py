"""The examples and the notebook run at a small size."""

import subprocess
import sys

import pytest

from tests.docs import notebook
from tests.packaging.tree import ROOT

EXAMPLES = ROOT / "examples"


def test_train_then_generate(tmp_path, programs):
    text = tmp_path / "text.txt"
    text.write_text("\n".join(f"the square of {i} is {i * i}." for i in range(3000)))
    small = ["--steps", 3, "--dim", 32, "--layers", 2, "--mixer", "gla", "--text", text, "--out", "run"]
    said = programs.run(tmp_path, EXAMPLES / "train.py", *small)
    assert "bits per byte" in said and "parameters" in said
    said = programs.run(tmp_path, EXAMPLES / "generate.py", "run", "--prompt", "the square", "--tokens", 5)
    assert said.count("the square") == 3 and "bytes" in said


def test_a_mixer_of_ones_own_learns(tmp_path, programs):
    said = programs.run(tmp_path, EXAMPLES / "own_mixer.py", "--steps", 60)
    losses = [float(line.split("loss ")[1].split()[0]) for line in said.splitlines() if line.startswith("step")]
    assert "chunk" in said and losses[-1] < losses[0] - 0.1


@pytest.mark.slow
def test_processes_share_a_sequence(tmp_path):
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, EXAMPLES / "parallel.py", "--steps", 2, "--tokens", 40]
    done = subprocess.run([sys.executable, *map(str, words)], cwd=tmp_path, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.split()[:2] for line in done.stdout.splitlines()] == [["step", "0"], ["step", "1"]]


@pytest.mark.slow
def test_the_notebook_runs(tmp_path, programs):
    book = tmp_path / "tour.py"
    book.write_text(notebook.program(EXAMPLES / "tour.ipynb"))
    said = programs.run(tmp_path, book)
    assert "after a reset the past is gone: True" in said and "█" in said and "bytes of state" in said


def test_a_notebook_with_outputs_is_refused(tmp_path):
    path = tmp_path / "x.ipynb"
    path.write_text((EXAMPLES / "tour.ipynb").read_text().replace('"outputs": []', '"outputs": [{"name": "stdout"}]', 1))
    with pytest.raises(AssertionError):
        notebook.load(path)
