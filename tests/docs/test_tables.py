"""The tables of the READMEs and of docs are those of the measured data."""

import importlib.util
import json
import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("benchmark_tables", ROOT / "benchmarks" / "tables.py")
tables = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tables)


@pytest.mark.parametrize("name", tables.PAGES)
def test_a_page_shows_what_was_measured(name):
    assert (ROOT / name).read_text(encoding="utf-8") == tables.filled(name), "run: python -m benchmarks.tables"


def test_a_comparison_on_a_task_becomes_a_table(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    (tmp_path / "README.md").write_text("<!-- from benchmarks/results/compare-recommend.json -->\n<!-- end -->\n", encoding="utf-8")
    assert "Not measured yet (`compare-recommend.json`)." in tables.filled("README.md")
    report = {
        "task": "recommend", "command": "linattn compare", "created": "2026-11-21T15:16:17+00:00", "options": {"seeds": 3},
        "machine": {"cpu": "a CPU", "torch": "2.13.0"}, "data": {"references": {"best that is possible": {"hr": 0.9, "ndcg": 0.7}}},
        "mixers": [{"name": "linrec", "hr": 0.815, "hr_spread": 0.01, "ndcg": 0.61234, "ndcg_spread": 0.001, "users_per_second": 9.0}],
    }  # fmt: skip
    (tmp_path / "benchmarks" / "results" / "compare-recommend.json").write_text(json.dumps(report), encoding="utf-8")
    text = tables.filled("README.md")
    assert "`linattn compare`: the mean of 3 seeds ± standard deviation, a CPU, torch 2.13.0, 2026-11-21." in text
    assert "| linrec | 81.50 % ± 1.00 % | 0.6123 ± 0.0010 |" in text and "| best that is possible | 90.00 % | 0.7000 |" in text


def test_the_plot_shows_what_was_measured():
    plots = runpy.run_path(str(ROOT / "benchmarks/plots.py"))
    for path, text in plots["drawings"]().items():
        assert path.read_text(encoding="utf-8") == text, "run: python benchmarks/plots.py"
    front = tables.filled("README.md")
    for name, ours, theirs, library in plots["times"]():
        assert re.search(rf"\| {name} \|.*\| {ours:.2f} \| {theirs:.2f} \({library}\) \|", front), name
