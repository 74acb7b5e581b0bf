import io
import sys

from linattn.cli.table import COLUMNS, lines, show


class Terminal(io.StringIO):
    def isatty(self):
        return True


def _on_terminal(report, monkeypatch, columns):
    stream = Terminal()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stream)
        patch.setenv("COLUMNS", str(columns))
        patch.setenv("TERM", "dumb")
        show(report)
    return stream.getvalue()


def test_lines_hold_the_figures(report):
    rows = lines(report)
    assert {len(row) for row in rows} == {len(COLUMNS)}
    assert rows[0] == ("softmax", "50000", "100", "2.0404", "900.0", "11.11", "256", "25.600", "1.000", "25600")
    assert rows[2][6:] == ("4096", "-", "-", "-")
    assert not any("\t" in cell or "\n" in cell for row in rows for cell in row)


def test_a_terminal_gets_a_table_notes_and_samples(report, monkeypatch):
    text = _on_terminal(report, monkeypatch, 120)
    assert "softmax at 4,096 tokens was left out: expected to take up to 31 s" in text
    row = next(line for line in text.splitlines() if line.startswith("gla "))
    assert row.split() == ["gla", "50,001", "2.152", "450", "25.6", "410", "2.00", "2.00", "800", "B", "800", "B"]
    assert text.count("alert(1)") == 2 * len(report["mixers"]), "a prompt and a sample each"


def test_a_terminal_sees_no_control_codes(report, monkeypatch):
    text = _on_terminal(report, monkeypatch, 120)
    assert not set("\x1b\x07\u202e") & set(text)


def test_text_in_brackets_is_no_markup(report, monkeypatch):
    report["mixers"][0]["sample"] = "[bold]x[/nothing][red]"
    assert "[bold]x[/nothing][red]" in _on_terminal(report, monkeypatch, 120)
