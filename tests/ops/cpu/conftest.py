import os

import pytest
import torch

from linattn.ops.cpu import build, library


def pytest_generate_tests(metafunc):
    """Parametrize ``isa`` by the available instruction sets without bfloat16 products, ``tiles`` by those with them.

    ``every_isa`` has both, for kernels compiled for all.
    """
    there = () if library.reason() else library.isas()
    taken = {"isa": [x for x in there if x not in build.TILES], "tiles": [x for x in there if x in build.TILES], "every_isa": list(there)}
    for name in taken.keys() & set(metafunc.fixturenames):
        metafunc.parametrize(name, taken[name] or ["none"], indirect=True)


def pytest_collection_modifyitems(config, items):
    """With the sanitized library (test_sanitize.py), select tests that run each instruction set and several threads."""
    if os.environ.get("LINATTN_CPU_SANITIZE") == "1":
        others = [item for item in items if not {"isa", "tiles", "every_isa", "threads"} & set(item.fixturenames) or _of_numbers(item)]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in set(others)]


def _of_numbers(item) -> bool:
    """True if a test of bfloat16 products covers no sizes and layouts beyond those of the others."""
    three = ("test_values_and_gradients", "test_packed", "test_threads_runs_and_layouts_change_no_bit")
    return "tiles" in item.fixturenames and item.originalname not in three


def _lowered(request):
    if library.reason():
        pytest.skip(library.reason())
    with library.lowered(request.param), library.guarded():
        yield request.param


@pytest.fixture
def isa(request):
    yield from _lowered(request)


@pytest.fixture
def every_isa(request):
    """Instruction set of a test for all available ones."""
    yield from _lowered(request)


@pytest.fixture
def tiles(request):
    """Instruction set of a test of bfloat16 products."""
    if request.param == "none":
        pytest.skip(library.reason() or "this machine has no products of bfloat16")
    with library.lowered(request.param), library.guarded():
        yield request.param


@pytest.fixture
def native():
    """Use only the kernels of the best instruction set."""
    if library.reason():
        pytest.skip(library.reason())


@pytest.fixture
def threads():
    """A function that sets the number of threads; restored after the test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)
