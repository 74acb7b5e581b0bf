"""What every test starts from: one thread, a fixed seed, no network."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # xdist workers share the cores
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
from hypothesis import settings

settings.register_profile("suite", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("suite")


@pytest.fixture(autouse=True)
def _seed():
    """The same random numbers whatever ran before on this worker."""
    torch.manual_seed(0)


def pytest_runtest_setup(item):
    """Tests marked gpu run where there is one."""
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
