"""The oldest transformers that is supported, beside the newest that is installed: the same tests, in a process of their own.

It lies in a folder of its own that comes first on that process's path, with the huggingface_hub that it wants; what is
installed stays as it is.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.oracles import wheels

OLDEST = "transformers==5.17.0"
BESIDE = ["huggingface_hub==1.33.0", "httpx==0.28.1", "httpcore==1.0.9"]
TESTS = {  # and how many there are at least
    "ours": (["model", "packing", "generate", "generate_state", "ordinary", "tokenizer"], 130),
    "theirs": (["load", "load_llama", "load_folder", "export", "patch", "patch_delta", "patch_mamba", "patch_mamba2", "patch_rwkv"], 250),
}
ROOT = Path(__file__).parents[2]

IMPORTED = """
import sys, huggingface_hub, transformers
print(transformers.__version__, huggingface_hub.__version__, transformers.__file__.startswith(sys.argv[1]))
"""


@pytest.fixture(scope="module")
def environment():
    folders = [str(wheels.path(requirement)) for requirement in (OLDEST, *BESIDE)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(folders), "OMP_NUM_THREADS": "1"}


@pytest.mark.slow
@pytest.mark.parametrize("part", TESTS)
def test_the_oldest_transformers_passes_the_same_tests(part, environment):
    names, least = TESTS[part]
    first = environment["PYTHONPATH"].split(os.pathsep)[0]
    done = subprocess.run([sys.executable, "-c", IMPORTED, first], capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.stdout == "5.17.0 1.33.0 True\n", done.stderr
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        *(f"tests/hf/test_{name}.py" for name in names),
    ]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None and int(passed[1]) > least, done.stdout[-500:]
