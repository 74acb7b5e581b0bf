"""The wheel has only the package, its py.typed marker and, with a compiler, the CPU kernels, and few requirements."""

import importlib.util
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import venv
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


@pytest.fixture(scope="module")
def native(tmp_path_factory):
    """With the kernels of this platform."""
    if build.library() is None:
        pytest.skip("the kernels are not compiled here")
    return built(tmp_path_factory.mktemp("native"))


def test_where_there_is_a_compiler_it_carries_the_kernels_of_this_platform(native):
    assert "-py3-none-" in native.name and not native.name.endswith("-any.whl")
    with zipfile.ZipFile(native) as archive:
        assert inside(archive) - sources() == {str(build.library().relative_to(ROOT))} and not sources() - inside(archive)
        (data,) = (n for n in archive.namelist() if n.endswith("dist-info/WHEEL"))
        assert b"Root-Is-Purelib: false" in archive.read(data)


@pytest.mark.skipif(sys.platform != "linux", reason="tags of other systems say nothing of libraries")
def test_its_tag_names_the_c_library_that_the_kernels_want(native):
    """Checked by auditwheel, if installed."""
    wanted = subprocess.run(["objdump", "-p", build.library()], capture_output=True, text=True).stdout
    if "libstdc++" in wanted or not wanted:
        pytest.skip("it is linked with this system's library of C++, or there is no objdump")
    major, minor = max((int(a), int(b)) for a, b in re.findall(r"GLIBC_(\d+)\.(\d+)", wanted))
    assert f"-py3-none-manylinux_{major}_{minor}_" in native.name
    if importlib.util.find_spec("auditwheel"):
        said = subprocess.run([sys.executable, "-m", "auditwheel", "show", native], capture_output=True, text=True).stdout
        assert f'"manylinux_{major}_{minor}_' in said.replace("\n", " ")


def test_the_source_distribution_holds_no_library(tmp_path):
    command = [sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", tmp_path]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (path,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {name for name in names if name.startswith("linattn/")} == sources()
    assert {"hatch_build.py", "pyproject.toml", "README.md", "LICENSE"} <= names


FRESH = """
import os, torch, linattn
from linattn.ops.cpu import library
assert linattn.__file__.startswith(os.environ["FRESH"]) and library.reason() is None, (linattn.__file__, library.reason())
q, k, v = torch.randn(3, 1, 70, 2, 32)
one, other = (linattn.linear_attention(q, k, v, backend=name) for name in ("cpu", "torch"))
print(float((one - other).norm() / other.norm()) < 1e-5, library.isa())
"""


@pytest.mark.slow
def test_it_works_in_a_fresh_environment_without_a_compiler(native, tmp_path):
    """With torch from here by a later path, and neither the sources nor a PATH."""
    fresh = tmp_path / "fresh"
    venv.create(fresh, with_pip=False, symlinks=True)
    python = fresh / "bin" / "python"
    (packages,) = fresh.glob("lib/python*/site-packages")
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index", native]
    subprocess.run(pip, check=True, capture_output=True)
    (packages / "torch.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    environment = {"PATH": "", "CXX": "no-such-compiler", "FRESH": str(fresh)}
    done = subprocess.run([python, "-c", FRESH], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.stdout.startswith("True "), done.stderr


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
