"""The wheel holds the package, its marker of types, the CPU kernels where there is a compiler and nothing else, and asks for little."""

import os
import re
import subprocess
import sys
import zipfile
from email.parser import Parser

import pytest

from linattn.ops.cpu import build
from tests.packaging.tree import ROOT, files


def built(folder, **environment):
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, env={**os.environ, **environment})
    (path,) = folder.glob("*.whl")
    return path


def inside(archive):
    return {name for name in archive.namelist() if ".dist-info/" not in name}


def sources():
    return {str(p.relative_to(ROOT)) for p in files() if p.is_relative_to(ROOT / "linattn")}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Without a compiler."""
    with zipfile.ZipFile(built(tmp_path_factory.mktemp("wheel"), CXX="no-such-compiler")) as archive:
        yield archive


def metadata(wheel):
    (name,) = (n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
    return Parser().parsestr(wheel.read(name).decode())


def test_it_holds_the_package_and_nothing_else(wheel):
    assert "linattn/py.typed" in inside(wheel) and "linattn/ops/cpu/native/vector.h" in inside(wheel)
    assert inside(wheel) == sources()
    assert wheel.filename.endswith("-py3-none-any.whl")


def test_where_there_is_a_compiler_it_carries_the_kernels_of_this_platform(tmp_path):
    library = build.library()
    if library is None:
        pytest.skip("the kernels are not compiled here")
    path = built(tmp_path)
    assert "-py3-none-" in path.name and not path.name.endswith("-any.whl")
    with zipfile.ZipFile(path) as archive:
        assert inside(archive) - sources() == {str(library.relative_to(ROOT))} and not sources() - inside(archive)
        (data,) = (n for n in archive.namelist() if n.endswith("dist-info/WHEEL"))
        assert b"Root-Is-Purelib: false" in archive.read(data)


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
