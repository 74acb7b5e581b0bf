"""Errors in `linattn show`: reported where a test bounds them, kept if it passes, and recorded for every mixer."""

import math

import pytest
import torch

from linattn.cli.main import main
from linattn.mixers.errors import measured_errors
from tests.oracles import record
from tests.oracles.compare import Error, distance


def test_an_error_is_heard_where_it_is_bounded():
    heard = []
    Error.listeners.append(lambda error, dtype: heard.append((error, dtype)))
    try:
        a, b = torch.tensor([3.0, 4.0], dtype=torch.float64), torch.tensor([3.0, 4.5])
        assert max(distance(a, a), distance(a, a + 1e-4)) < 1e-3
        assert distance(a, b.double()) < 0.5 and distance(b, b) < 1e-9
        assert distance(b, a) > 1e-3 and not distance(b, a) < 1e-3, "one that is too large is none that was reached"
    finally:
        Error.listeners.pop()
    off = 1e-4 * math.sqrt(2) / math.hypot(3 + 1e-4, 4 + 1e-4)
    assert [(pytest.approx(error), dtype) for error, dtype in heard] == [(off, torch.float64), (0.0, torch.float32)]


def test_a_file_is_recorded_and_one_that_fails_is_not(tmp_path):
    text = "import torch\nfrom tests.oracles.compare import distance\none = torch.ones(1)\n"
    text += "def test_a():\n    assert distance(one + 1e-4, one) < 1e-3\n"
    text += "def test_b():\n    assert distance(one.double(), one.double()) < 1e-3\n"
    (tmp_path / "test_x.py").write_text(text)
    ((_, found),) = record.recorded([tmp_path / "test_x.py"]).found.items()
    assert found == {"float32": [pytest.approx(1e-4, rel=1e-2)], "float64": [0.0]}
    (tmp_path / "test_y.py").write_text(text + "def test_c():\n    assert distance(2 * one, one) < 1e-3\n")
    with pytest.raises(SystemExit, match="nothing was written"):
        record.recorded([tmp_path / "test_y.py"])


def test_every_mixer_is_recorded():
    compared = record.tests()
    missing = {name for name in compared if measured_errors(name) is None}
    assert missing == set(), "python -m tests.oracles.record NAME... records them"


@pytest.mark.parametrize("name", sorted(record.tests()))
def test_what_is_recorded(name):
    errors = measured_errors(name)
    if errors is not None:
        assert (record.HERE.parents[1] / errors.test).is_file() and errors.comparisons > 0
        assert errors.largest and all(0 <= error < 1e-4 for error in errors.largest.values())


def test_show_tells_it(capsys):
    assert main(["show", "gla"]) == 0
    assert measured_errors("gla").told() in capsys.readouterr().out
