"""`make test-gpu` on a bare image: it needs only torch, triton, numpy and pytest with their dependencies."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
ROOT = Path(__file__).parents[2]
COLLECT = """
import importlib.machinery, re, sys
from importlib.metadata import PackageNotFoundError, packages_distributions, requires

there, ahead = set(), ["torch", "triton", "numpy", "pytest", "pip", "setuptools"]
while ahead:
    name = re.sub(r"[-_.]+", "-", ahead.pop()).lower()
    if name in there:
        continue
    there.add(name)
    try:
        wanted = requires(name) or []
    except PackageNotFoundError:
        continue
    ahead += [re.match(r"[\\w.-]+", line)[0] for line in wanted if "extra ==" not in line]
known = {top: {re.sub(r"[-_.]+", "-", d).lower() for d in of} for top, of in packages_distributions().items()}
absent = {top for top, of in known.items() if not of & there} - {"linattn"}
assert {"transformers", "safetensors", "typer", "hypothesis"} <= absent and not absent & {"torch", "triton", "numpy", "pytest"}
plain = importlib.machinery.PathFinder


class Bare:
    invalidate_caches = plain.invalidate_caches

    @staticmethod
    def find_spec(name, path=None, target=None):
        return None if name.partition(".")[0] in absent else plain.find_spec(name, path, target)


sys.meta_path = [Bare if finder is plain else finder for finder in sys.meta_path]

import pytest, torch

torch.cuda.is_available = lambda: True
sys.exit(pytest.main(["-m", "gpu", "--collect-only", "-q", "-p", "no:cacheprovider"]))
"""


def test_every_test_for_a_gpu_is_collected_there():
    kept = {n: x for n, x in os.environ.items() if not n.startswith(("PYTEST", "TRITON"))}
    environment = {**kept, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run([sys.executable, "-c", COLLECT], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    for file in ("tests/ops/triton/test_forms.py", "tests/ops/triton/test_decode.py", "tests/mixers/test_gpu.py", "tests/generate"):
        assert f"\n{file}" in f"\n{done.stdout}", file
