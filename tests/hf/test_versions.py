"""The same tests with the oldest and the newest supported transformers, in separate processes.

Both are in folders that come first on the process's path, the oldest with its huggingface_hub; the installed one is unchanged.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.oracles import wheels

VERSIONS = {
    "5.17.0": ["huggingface_hub==1.33.0", "httpx==0.28.1", "httpcore==1.0.9"],
    "5.24.0": [],  # the first that calls the cache "cache"
}
TESTS = {  # and their minimum number
    "ours": (["model", "packing", "generate", "generate_state", "generate_assisted", "ordinary", "tokenizer"], 150),
    "theirs": (["load", "load_llama", "load_folder", "export", "patch", "patch_delta", "patch_mamba", "patch_mamba2", "patch_rwkv"], 250),
}
ROOT = Path(__file__).parents[2]

IMPORTED = """
import sys, transformers
print(transformers.__version__, transformers.__file__.startswith(sys.argv[1]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("part", TESTS)
@pytest.mark.parametrize("version", VERSIONS)
def test_other_versions_of_transformers_pass_the_same_tests(version, part):
    folders = [str(wheels.path(requirement)) for requirement in (f"transformers=={version}", *VERSIONS[version])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folders), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", IMPORTED, folders[0]], capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.stdout == f"{version} True\n", done.stderr
    names, least = TESTS[part]
    files = [f"tests/hf/test_{name}.py" for name in names]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *files]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None and int(passed[1]) > least, done.stdout[-500:]
