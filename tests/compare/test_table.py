import io
import json
import re
import sys
from pathlib import Path

from linattn.cli.table import COLUMNS, lines, show, show_rows
from linattn.experiment.study import Column, share
from linattn.reproduce.ledger import load

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


class Terminal(io.StringIO):
    def isatty(self):
        return True


def _on_terminal(report, monkeypatch, columns):
    return _shown(monkeypatch, columns, show, report)


def _shown(monkeypatch, columns, shower, *shown, term="dumb"):
    stream = Terminal()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stream)
        patch.setenv("COLUMNS", str(columns))
        patch.setenv("TERM", term)
        shower(*shown)
    return stream.getvalue()


def test_lines_hold_the_figures(report):
    rows = lines(report)
    assert {len(row) for row in rows} == {len(COLUMNS)}
    assert rows[0] == ("softmax", "50000", "100", "2.0404", "900.0", "11.11", "256", "25.600", "1.000", "25600", "0.004", "0.0125")
    assert rows[2][6:] == ("4096", "-", "-", "-", "0.004", "0.0125")
    assert not any("\t" in cell or "\n" in cell for row in rows for cell in row)


def test_a_terminal_gets_a_table_notes_and_samples(report, monkeypatch):
    text = _on_terminal(report, monkeypatch, 120)
    assert "softmax at 4,096 tokens was left out: expected to take up to 31 s" in text
    row = next(line for line in text.splitlines() if line.startswith("gla "))
    assert row.split() == ["gla", "2.152", "±", "0.013", "450", "25.6", "410", "2.00", "2.00", "800", "B", "800", "B"]
    assert text.count("alert(1)") == 2 * len(report["mixers"]), "a prompt and a sample each"


def test_a_terminal_sees_no_control_codes(report, monkeypatch):
    text = _on_terminal(report, monkeypatch, 120)
    assert not set("\x1b\x07\u202e") & set(text)


def test_text_in_brackets_is_no_markup(report, monkeypatch):
    report["mixers"][0]["sample"] = "[bold]x[/nothing][red]"
    assert "[bold]x[/nothing][red]" in _on_terminal(report, monkeypatch, 120)


def test_a_narrow_terminal_cuts_off_no_figure_and_no_name(monkeypatch):
    columns = (
        Column("mixer", "mixer"), Column("score", "score at the end", share, spread=True), Column("bytes", "what was never measured"),
        Column("paper_says", "paper says"), Column("source", "source"), Column("agrees", "so here"),
    )  # fmt: skip
    row = {"score": 0.123, "score_spread": 0.045, "source": "arXiv 2404.08819"}
    mixers = ("deltanet:heads=8:conv_width=1", "deltanet:heads=8:conv_width=1:negative_eigenvalues=true")
    for width in (40, 80):
        rows = [{**row, "mixer": mixer} for mixer in mixers]
        text = re.sub(r"\x1b\[\d*m", "", _shown(monkeypatch, width, show_rows, columns, rows, term="xterm"))
        assert max(map(len, text.splitlines())) <= width
        assert "…" not in text and "never" not in text and "paper" not in text, "empty columns are left out"
        assert text.count("0.123") == text.count("0.045") == 2 and text.count("β<2") == 1


def test_the_table_of_capacity_fits_120_columns(monkeypatch):
    body = json.loads((RESULTS / "reproduce-capacity-quick.json").read_text())
    study = load("capacity")
    rows = study.rows(study.quick, [(one["run"], one["result"]) for one in body["runs"]])
    text = re.sub(r"\x1b\[\d*m", "", _shown(monkeypatch, 120, show_rows, study.all_columns, rows, term="xterm"))
    assert len(text.splitlines()) == 1 + len(rows), "each row is one line"
    assert "paper says" not in text and "so here" not in text
