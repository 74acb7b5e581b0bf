"""Common setup of tests: one thread, a fixed seed, no network."""

import gc
import os
import re

os.environ.setdefault("OMP_NUM_THREADS", "1")  # xdist workers share the cores
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch

try:
    from hypothesis import settings
except ModuleNotFoundError:  # if only GPU tests run
    pass
else:
    settings.register_profile("suite", deadline=None, derandomize=True, print_blob=True)
    settings.load_profile("suite")

pytest_plugins = ["tests.durations"]

LONG = 5.0  # seconds
os.fsync = lambda file: None  # saves milliseconds per call; child processes still sync
GPU = re.compile(r"mark\.gpu|ops.triton")  # all tests of tests/ops/triton are marked
for device in (torch.cuda, torch.xpu, torch.mtia):
    if not device.is_available():  # it would record each seed with a stack trace for lazy initialisation: two milliseconds
        device.manual_seed_all = lambda seed: None


@pytest.fixture(autouse=True)
def _seed():
    """Random numbers independent of earlier tests of the worker."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def programs():
    """Runs programs in separate processes."""
    from tests.programs import Programs

    found = Programs()
    yield found
    found.close()


def pytest_ignore_collect(collection_path, config):
    """With `pytest -m gpu` skip files without such tests, so that only torch, triton, numpy and pytest are needed."""
    if config.option.markexpr != "gpu":
        return None
    files = collection_path.rglob("*.py") if collection_path.is_dir() else [collection_path]
    return None if any(GPU.search(str(path) + path.read_text(encoding="utf-8")) for path in files) else True


def pytest_collection_modifyitems(items):
    """Start with the files of the slowest tests, to balance workers at the end.

    Files are not split, so that module fixtures are created once.
    """
    from tests import durations  # after pytest has it as a plugin

    slowest: dict[str, float] = {}
    for name, seconds in durations.slowest().items():
        file = name.split("::")[0]
        slowest[file] = max(seconds, slowest.get(file, LONG))
    items.sort(key=lambda item: -slowest.get(item.nodeid.split("::")[0], LONG))


def pytest_collection_finish(session):
    """Freeze the objects of collection for the garbage collector, and raise its thresholds.

    Each saves a tenth of the suite's time: tracing a mixer creates some hundred thousand objects, nearly all without cycles.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


def pytest_runtest_setup(item):
    """Skip tests marked gpu without a GPU."""
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
