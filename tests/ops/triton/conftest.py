"""These tests run on a GPU, or with TRITON_INTERPRET=1 at tiny shapes on the CPU; test_triton_interpreter.py starts the latter."""

import os
from pathlib import Path

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HERE = Path(__file__).parent

if INTERPRETED:
    from tests.ops.triton import interpreter  # noqa: F401  before any kernel runs


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Mark tests as GPU tests unless interpreted."""
    for item in items:
        if not INTERPRETED and HERE in item.path.parents:
            item.add_marker("gpu")


@pytest.fixture
def device() -> str:
    """Device of the tests of scans."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """Segments of 256 tokens in parts, interpreted chunks of 16 and segments of 32: so that few tokens cross all borders."""
    from linattn.ops.triton import table

    monkeypatch.setattr(table, "FEWEST", 2)
    monkeypatch.setattr(table, "SHORTEST", 256)
    monkeypatch.setattr(table, "PARTED", 1)
    if INTERPRETED:
        monkeypatch.setattr(table, "chunk", lambda half: 16)
        monkeypatch.setattr(table, "SHORTEST", 16)
        monkeypatch.setattr(table, "PROGRAMS", 8)


@pytest.fixture(autouse=not INTERPRETED)
def waited_for():
    """Synchronise, so that a fault on the device fails the test that caused it."""
    import torch

    yield
    torch.cuda.synchronize()
