"""First hour of a user: the front page, Start and the guides followed literally in a fresh environment, then fifteen wrong turns."""

import json
import os
import re
import subprocess
import sys
import sysconfig
import time
import venv

import pytest

from tests.docs import markdown
from tests.packaging.test_wheel import built
from tests.packaging.tree import ROOT

pytestmark = pytest.mark.slow
GUIDES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs/guides").glob("*.md"))
SMALL = {  # what is added to a command of a page, so that it takes seconds
    "train": "--steps 2 --dim 32 --layers 2 --context 32",
    "convert": "--tokens1 2048 --tokens2 2048 --context 32 --batch-size 4",
    "evaluate": "--tokens 2000 --context 64 --lengths 512 --samples 1 --decode 0",
    "generate": "--max-new-tokens 4",
}
STARTED = {"linattn": "linattn", "torchrun": "torch.distributed.run"}  # a program, and the module that is the same
WITHOUT = "import sys; sys.modules['{}'] = None; from linattn.cli.main import main; sys.exit(main({!r}))"


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """The interpreter of an environment with the wheel, and the packages of this one behind it."""
    folder = tmp_path_factory.mktemp("hour")
    venv.create(folder / "venv", with_pip=False, symlinks=True)
    interpreter = folder / "venv/bin/python"
    wheel = built(folder)
    pip = [sys.executable, "-m", "pip", "--python", interpreter, "install", "--quiet", "--no-deps", "--no-index", wheel]
    subprocess.run(pip, check=True, capture_output=True)
    (packages,) = (folder / "venv").glob("lib/python*/site-packages")
    (packages / "behind.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return interpreter


def run(folder, *words):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")} | {"CXX": "no-such-compiler"}
    return subprocess.run([*map(str, words)], cwd=folder, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL)


@pytest.mark.parametrize("page", ["README.md", "docs/start.md", *GUIDES])
def test_a_page_is_followed(python, page, tmp_path):
    started = time.perf_counter()
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (tmp_path / "text.txt").write_text(text * 3, encoding="utf-8")
    (tmp_path / "documents.jsonl").write_text("\n".join(json.dumps({"text": text}) for _ in range(200)), encoding="utf-8")
    (tmp_path / "page.py").write_text(markdown.python(ROOT / page), encoding="utf-8")
    done = run(tmp_path, python, "-W", "error", "page.py")
    said = re.sub(r".*\d+/\d+ \[.*", "", done.stderr).strip()  # without transformers' progress bars
    assert done.returncode == 0 and not said, done.stderr
    for program, *words in markdown.commands(ROOT / page):
        if program in STARTED and words[0] != "compare":
            name = words[words.index("linattn") + 1] if "linattn" in words else words[0]
            small = "--steps 3" if "--resume" in words else SMALL.get(name, "")
            done = run(tmp_path, python, "-m", STARTED[program], *words, *small.split())
            assert done.returncode == 0 and "Warning" not in done.stderr, done.stderr
    print(f"{page}: {time.perf_counter() - started:.0f} s")


TURNS = {  # what is typed -> what the one line ends with
    "show gal": r"did you mean 'gla'\?",
    "trian": r"Did you mean 'train'.*",
    "frobnicate": r"; see linattn --help",
    "show": r"; see linattn show --help",
    "train --setps 3": r"Possible options: .*--steps.*\)",
    "train --mixer gal --out x": r"did you mean 'gla'\?",
    "train --mixer-option gla.haeds=3 --out x": r"did you mean 'heads'\?",
    "train --steps many --out x": r"a valid integer.*, but came as 'many'",
    "train --dim 33 --out x": r"must be a positive multiple of its heads, but came as 33 with 4 heads",
    "train --text nothing.txt --out x": r"No such file or directory: nothing.txt",
    "train --device cuda:9 --out x": r"is not available: .*",
    "generate nothing --prompt a": r"nothing does not exist",
    "generate organisation/model --prompt a": r"does not exist; .* hf download organisation/model --local-dir FOLDER, then give FOLDER",
    "draw gla --what cells -o x.svg": r"Invalid value for '--what': 'cells' is not one of 'cell', .*",
    "export nothing out --to llama": r"nothing does not exist",
}


@pytest.mark.parametrize("typed", TURNS)
def test_a_wrong_command_is_answered_in_one_line(python, typed, tmp_path):
    done = run(tmp_path, python, "-m", "linattn", *typed.split())
    assert done.returncode == 2 and re.fullmatch(rf"linattn: .*{TURNS[typed]}\n", done.stderr), done.stderr
    assert not (tmp_path / "x").exists()


def test_a_missing_package_is_named(python, tmp_path):
    done = run(tmp_path, python, "-c", WITHOUT.format("transformers", ["train", "--steps", "1", "--out", "x"]))
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert re.search(r"transformers is not installed; .*pip install 'transformers", done.stderr) and "linattn[" not in done.stderr


def test_a_missing_compiler_is_named(python, tmp_path):
    done = run(tmp_path, python, "-m", "linattn.ops.cpu.build")
    assert done.returncode == 0 and re.fullmatch(
        r"linattn: the portable form will be used on the CPU: there is no C\+\+ compiler.*\n", done.stderr
    )


CALLS = {
    "linattn.linear_atention": r"did you mean 'linear_attention'\?",
    "linattn.linear_attention(q, q, q, form='chunked')": r"form must be one of .*, but came as 'chunked'",
    "linattn.linear_attention(q, q, q, decay=-torch.rand(1, 9, 2))": r"transpose\(1, 2\)",
    "linattn.mixers.create('gla', dim=64, haeds=4)": r"did you mean 'heads'\?",
    "linattn.load('organisation/model')": r"organisation/model does not exist; .*hf download organisation/model .*",
}


def test_a_wrong_call_is_answered_in_one_line(python, tmp_path):
    lines = [f"try: {call}\nexcept Exception as error: print(str(error))" for call in CALLS]
    (tmp_path / "calls.py").write_text("import torch, linattn\nq = torch.randn(1, 2, 9, 4)\n" + "\n".join(lines), encoding="utf-8")
    done = run(tmp_path, python, "calls.py")
    said = done.stdout.splitlines()
    assert len(said) == len(CALLS), done.stderr
    for line, wanted in zip(said, CALLS.values(), strict=True):
        assert re.search(rf"{wanted}$", line), line
