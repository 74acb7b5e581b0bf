import os

import pytest
import torch

from linattn.ops.cpu import library


def pytest_generate_tests(metafunc):
    """A test that asks for ``isa`` runs once with each instruction set that there is; AMX's kernels have tests of their own."""
    if "isa" in metafunc.fixturenames:
        missing = library.reason()
        names = ["none"] if missing else [name for name in library.isas() if name != "amx"]
        metafunc.parametrize("isa", names, indirect=True)


def pytest_collection_modifyitems(config, items):
    """With the sanitized library (test_sanitize.py), those that call the kernels of each instruction set, and on several threads."""
    if os.environ.get("LINATTN_CPU_SANITIZE") == "1":
        others = [item for item in items if not {"isa", "tiles", "threads"} & set(item.fixturenames)]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in set(others)]


@pytest.fixture
def isa(request):
    if library.reason():
        pytest.skip(library.reason())
    with library.lowered(request.param), library.guarded():
        yield request.param


@pytest.fixture
def tiles():
    """For a test of the kernels that AMX has."""
    if library.reason() or library.isa() != "amx":
        pytest.skip(library.reason() or "this machine has no AMX")
    with library.guarded():
        yield


@pytest.fixture
def native():
    """For a test of the kernels of the best instruction set alone."""
    if library.reason():
        pytest.skip(library.reason())


@pytest.fixture
def threads():
    """A function that sets the number of threads, which is undone after the test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)
