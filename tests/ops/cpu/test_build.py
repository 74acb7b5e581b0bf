"""Build of the library: names derived from the sources, one copy per instruction set, and the message without a compiler."""

import re
import shutil
import subprocess

import pytest
import torch

import linattn
from linattn.ops.cpu import build, library

KERNEL = """#include "vector.h"
namespace linattn { namespace LINATTN_ISA {
LINATTN_ENTRY(lanes)(int64_t* lanes, int64_t) { *lanes = LANES; }
} }
"""


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """Small sources of their own."""
    native = tmp_path / "native"
    native.mkdir()
    for name in ("isa.cpp", "vector.h"):
        shutil.copy(build.NATIVE / name, native)
    (native / "lanes.cpp").write_text(KERNEL)
    monkeypatch.setattr(build, "NATIVE", native)
    monkeypatch.setattr(build, "BUILT", tmp_path / "built")
    build.key.cache_clear()
    yield native
    build.key.cache_clear()


def objects():
    return {path.name for path in build.BUILT.glob("*.o")}


@pytest.mark.usefixtures("native")
def test_a_library_is_of_its_sources(tree):
    assert build.library() is None
    path = build.build()
    assert build.library() == path == build.build() and not list(build.BUILT.glob(".half*"))
    before = objects()
    (tree / "lanes.cpp").write_text(KERNEL + "// other\n")
    build.key.cache_clear()
    assert build.library() is None
    other = build.build()
    assert build.library() == other != path and not path.exists()
    assert {name for name in objects() if name.startswith("isa-")} == {name for name in before if name.startswith("isa-")}
    assert len(objects()) == len(before) and not objects() & {name for name in before if name.startswith("lanes-")}


@pytest.mark.usefixtures("native")
def test_what_does_not_compile_is_an_error(tree, capsys, monkeypatch):
    (tree / "lanes.cpp").write_text("#error no kernel\n")
    with pytest.raises(build.BuildError, match="no kernel"):
        build.build()
    monkeypatch.setattr("sys.argv", ["build"])
    assert build.main() == 1 and "no kernel" in capsys.readouterr().err
    assert build.library() is None


def test_without_a_compiler_it_says_so(tree, capsys, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr("sys.argv", ["build"])
    assert build.main() == 0 and "no C++ compiler (no-such-compiler)" in capsys.readouterr().err
    with pytest.raises(build.NoCompilerError):
        build.build()


def test_what_is_not_compiled_is_explained(tree):
    caches = (library._loaded, library.isas, library._kernel)
    for cache in caches:
        cache.cache_clear()
    try:
        x = torch.zeros(1, 3, 2)
        said = linattn.explain(linattn.diagonal_scan, x, x)
        assert "cpu: no, its kernels are not compiled" in said and "python -m linattn.ops.cpu.build" in said and "torch: runs" in said
        with pytest.raises(RuntimeError, match="not compiled"):
            library.call("lanes", x)
    finally:
        for cache in caches:
            cache.cache_clear()


def test_an_unknown_instruction_set_is_refused(monkeypatch):
    monkeypatch.setattr(library, "_lowered", "avx9")
    library._loaded.cache_clear()
    try:
        assert "LINATTN_CPU_ISA must be one of portable" in library.reason()
    finally:
        library._loaded.cache_clear()


@pytest.mark.usefixtures("native")
def test_lanes_follow_the_instruction_set():
    wanted = {"portable": 4, "avx2": 8, "avx512": 16, "avx512bf16": 16, "amx": 16, "neonbf16": 4}
    for isa in library.isas():
        with library.lowered(isa):
            lanes = torch.zeros(1, dtype=torch.int64)
            library.call("lanes", lanes)
        assert lanes.item() == wanted[isa]


@pytest.mark.usefixtures("native")
@pytest.mark.skipif(shutil.which("nm") is None, reason="it reads the names in objects by nm")
def test_no_function_is_shared_between_instruction_sets():
    """A linker keeps one copy of a function in several objects, which may not run on this machine."""
    shared = []
    for path in build.BUILT.glob("*-plain-*.o"):
        names = subprocess.run(["nm", "-C", "--defined-only", path], capture_output=True, text=True, check=True).stdout
        isa = re.search(r"-(\w+)-plain-", path.name)[1]
        if isa != "portable":
            shared += [line for line in names.splitlines() if re.search(r" [WVu] ", line) and f"linattn::{isa}::" not in line]
    assert shared == []
