"""The wheel holds the package, its marker of types and nothing else, and asks for little."""

import re
import subprocess
import sys
import zipfile
from email.parser import Parser

import pytest

from tests.packaging.tree import ROOT, files


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder], cwd=ROOT, check=True, capture_output=True)
    (path,) = folder.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        yield archive


def metadata(wheel):
    (name,) = (n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
    return Parser().parsestr(wheel.read(name).decode())


def test_it_holds_the_package_and_nothing_else(wheel):
    inside = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert "linattn/py.typed" in inside
    assert inside == {str(p.relative_to(ROOT)) for p in files() if p.is_relative_to(ROOT / "linattn")}


def test_the_base_needs_four_packages(wheel):
    needs = [line for line in metadata(wheel).get_all("Requires-Dist") if "extra ==" not in line]
    assert {re.match(r"[\w-]+", line)[0] for line in needs} == {"torch", "safetensors", "numpy", "typer"}
    assert "torch>=2.11" in needs


def test_its_metadata_say_what_it_is(wheel):
    data = metadata(wheel)
    assert data["License-Expression"] == "Apache-2.0" and data["Requires-Python"] == ">=3.11" and data["Summary"]
    assert {"train", "hf", "gpu", "docs", "test"} <= set(data.get_all("Provides-Extra"))
    (points,) = (n for n in wheel.namelist() if n.endswith("entry_points.txt"))
    assert "linattn = linattn.cli.main:main" in wheel.read(points).decode()
    assert any(n.endswith("licenses/LICENSE") for n in wheel.namelist())
