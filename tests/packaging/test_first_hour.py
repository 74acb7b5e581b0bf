"""First hour of a user: the front page, Start and the guides followed literally in a fresh environment, then wrong turns."""

import json
import subprocess
import sys
import sysconfig
import venv

import pytest

from benchmarks import RESULTS
from benchmarks import first_hour as hour
from tests.packaging.test_wheel import built
from tests.packaging.tree import ROOT


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """The interpreter of an environment with the wheel, followed by this one's packages."""
    folder = tmp_path_factory.mktemp("hour")
    venv.create(folder / "venv", with_pip=False, symlinks=True)
    interpreter = folder / "venv/bin/python"
    wheel = built(folder)
    pip = [sys.executable, "-m", "pip", "--python", interpreter, "install", "--quiet", "--no-deps", "--no-index", wheel]
    subprocess.run(pip, check=True, capture_output=True)
    (packages,) = (folder / "venv").glob("lib/python*/site-packages")
    (packages / "behind.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return interpreter


@pytest.mark.slow
@pytest.mark.parametrize("page", hour.PAGES)
def test_a_page_is_followed(python, page, tmp_path):
    hour.supplied(tmp_path)
    rows = list(hour.follow(hour.User(python, tmp_path), ROOT / page, hour.small))
    assert rows and [row for row in rows if row["ended"] != "ran" or row["said"]] == []


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "typed"), [(kind, typed) for kind, some in hour.TURNS.items() for typed in some])
def test_a_wrong_turn_is_answered_in_one_line(python, kind, typed, tmp_path):
    said = hour.User(python, tmp_path).answer(typed, kind)
    assert hour.right(said, hour.TURNS[kind][typed]), said
    assert not (tmp_path / "x").exists()
    assert "linattn[" not in said  # an extra cannot be had from an index yet


def test_what_fails_or_warns_is_seen(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "```python\nx = 1\n```\n```python\nprint(x)\n```\n```python\nimport warnings\nwarnings.warn('old')\n```\n"
        "```python\n1 / 0\n```\n```sh\npip install .\nlinattn --version  # a comment\nlinattn frobnicate\n```\n"
    )
    rows = list(hour.follow(hour.User(sys.executable, ROOT), page))
    assert [row["ended"] for row in rows] == ["ran", "ran", "ran", "failed", "ran", "failed"]
    assert [row["line"] for row in rows] == [2, 5, 8, 12, 16, 17]
    assert "UserWarning: old" in rows[2]["said"] and "ZeroDivisionError" in rows[3]["said"] and not rows[1]["said"] + rows[4]["said"]


def test_the_record_has_every_page_and_wrong_turn_and_no_failure():
    steps = json.loads((RESULTS / "first-hour.json").read_text(encoding="utf-8"))["steps"]
    assert [*steps] == [*hour.INSTALLATIONS, *hour.PAGES, "turns"]
    assert all(row["ended"] == "ran" and not row["said"] for name, step in steps.items() if name != "turns" for row in step["rows"])
    said = {(row["kind"], row["typed"]): row["said"] for row in steps["turns"]["rows"]}
    assert [*said] == [(kind, typed) for kind, some in hour.TURNS.items() for typed in some]
    assert all(hour.right(answer, hour.TURNS[kind][typed]) for (kind, typed), answer in said.items())
