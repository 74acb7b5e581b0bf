"""What every test starts from: one thread, a fixed seed, no network."""

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
except ModuleNotFoundError:  # where only the GPU's tests run
    pass
else:
    settings.register_profile("suite", deadline=None, derandomize=True, print_blob=True)
    settings.load_profile("suite")

pytest_plugins = ["tests.durations"]

LONG = 5.0  # seconds
os.fsync = lambda file: None  # no test cuts the power, and disks take milliseconds; processes that tests start still wait for theirs
GPU = re.compile(r"mark\.gpu|ops.triton")  # all tests of tests/ops/triton are marked
for device in (torch.cuda, torch.xpu, torch.mtia):
    if not device.is_available():  # it would keep each seed for when there is one, with the whole stack as text: two milliseconds
        device.manual_seed_all = lambda seed: None


@pytest.fixture(autouse=True)
def _seed():
    """The same random numbers whatever ran before on this worker."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def programs():
    """Runs programs, each in a process of its own."""
    from tests.programs import Programs

    found = Programs()
    yield found
    found.close()


def pytest_ignore_collect(collection_path, config):
    """`pytest -m gpu` reads nothing that cannot have such tests: it needs torch, triton, numpy and pytest alone."""
    if config.option.markexpr != "gpu":
        return None
    files = collection_path.rglob("*.py") if collection_path.is_dir() else [collection_path]
    return None if any(GPU.search(str(path) + path.read_text(encoding="utf-8")) for path in files) else True


def pytest_collection_modifyitems(items):
    """Begin with the files of the tests that take longest, so that no worker waits for another at the end.

    A file stays whole: a fixture of the module would be made again for the tests that come later.
    """
    from tests import durations  # after pytest has it as a plugin

    slowest: dict[str, float] = {}
    for name, seconds in durations.slowest().items():
        file = name.split("::")[0]
        slowest[file] = max(seconds, slowest.get(file, LONG))
    items.sort(key=lambda item: -slowest.get(item.nodeid.split("::")[0], LONG))


def pytest_collection_finish(session):
    """Keep what collection made, which lives until the end, out of the garbage collector's later passes, and make these rarer.

    Each saves a tenth of the suite's time: tracing a mixer makes some hundred thousand objects, nearly all without cycles.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


def pytest_runtest_setup(item):
    """Tests marked gpu run where there is one."""
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
