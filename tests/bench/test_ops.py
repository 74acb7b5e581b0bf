"""``linattn bench`` on a CPU: which options mean what."""

import json

import pytest

from linattn.bench import ops
from linattn.cli.main import main


@pytest.fixture
def compared(monkeypatch):
    """Names of the measured peers, without measuring."""
    names = []
    monkeypatch.setattr(ops, "LENGTHS", {"forward": (16,)})
    monkeypatch.setattr(ops, "LONG", (16,))
    monkeypatch.setattr(ops, "check", lambda cell: None)

    def compare(cell, rounds):
        names.append(cell.peer.name)
        return ops.Row(cell.peer.name, cell.peer.what, cell.mode, "float32", 16, 1, 1, 1, 1.0, 2.0, 2.0, rounds, None)

    monkeypatch.setattr(ops, "compare", compare)
    return names


def test_peers_of_ops(compared, tmp_path, capsys):
    run = ["bench", "ops", "--device", "cpu", "--quick", "--out", str(tmp_path / "ops.json")]
    assert main([*run, "--peers", ""]) == 0
    assert compared == []
    written = json.loads((tmp_path / "ops.json").read_text())
    assert written["rows"] == [] and [row["tokens"] for row in written["growth_us_per_token"]] == [16]
    assert "theirs" not in capsys.readouterr().out
    assert main([*run, "--peers", "token-loop"]) == 0
    assert compared == ["token-loop"]
    assert main(run) == 0
    assert {"gated-delta", "token-loop", "per-head"} < set(compared)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["train", "--peers", ""], "--peers cannot be used with train on cpu"),
        (["train", "--seconds", "0"], "--seconds cannot be used with train on cpu"),
        (["vision", "--peers", ""], "--peers cannot be used with vision on cpu"),
        (["ops", "--families", "head", "--models", "gla"], "--families and --models cannot be used with ops on cpu"),
    ],
)
def test_options_that_mean_nothing_are_refused(arguments, says, capsys):
    assert main(["bench", *arguments, "--device", "cpu"]) == 2
    assert capsys.readouterr().err == f"linattn: {says}\n"
