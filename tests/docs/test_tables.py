"""The tables of the READMEs are those of the measured data."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("benchmark_tables", ROOT / "benchmarks" / "tables.py")
tables = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tables)


@pytest.mark.parametrize("name", tables.TITLES)
def test_a_readme_shows_what_was_measured(name):
    assert (ROOT / name).read_text(encoding="utf-8") == tables.filled(name), "run: python benchmarks/tables.py"
