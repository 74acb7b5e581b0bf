"""Cross-compiled kernels of another architecture, called in an emulator, one process per call."""

from __future__ import annotations

import ctypes
import importlib.util
import shutil
import struct
import subprocess
from pathlib import Path

import pytest
from torch import Tensor

from linattn.ops.cpu import build, linear_attention

HERE = Path(__file__).parent
ADDRESS = 0x40_0000_0000  # address of the calls' memory
HEADER = struct.Struct("128s80q4d")  # layout in emulated.cpp
COMPILER, EMULATOR, ROOT = "aarch64-linux-gnu-g++", "qemu-aarch64", "/usr/aarch64-linux-gnu"


def compiled(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Emulated:
    """The library that ``build.py`` makes for ARM, and the program that calls it."""
    if missing := [tool for tool in (COMPILER, EMULATOR) if shutil.which(tool) is None]:
        pytest.skip(f"there is no {' and no '.join(missing)}: apt install g++-aarch64-linux-gnu qemu-user libc6-arm64-cross")
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    monkeypatch.setenv("CXX", COMPILER)
    spec = importlib.util.spec_from_file_location("build_for_arm", build.__file__)
    other = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(other)
    other.BUILT = folder
    other.FLAGS = (*other.FLAGS, "-O1", "-Werror")  # takes half the time
    driver = folder / "driver"
    subprocess.run([COMPILER, "-std=c++17", "-O1", str(HERE / "emulated.cpp"), "-o", str(driver), "-ldl"], check=True)
    return Emulated(other.build(), driver, other.ISAS)


class Emulated:
    """A library whose kernels run on a processor of the emulator."""

    def __init__(self, library: Path, driver: Path, isas: dict):
        self.library, self.driver, self.isas = library, driver, list(isas)
        self.isa, self.calls, self.tensors = "portable", [], []

    def run(self, *arguments: str, cpu: str = "max") -> str:
        command = [EMULATOR, "-L", ROOT, "-cpu", cpu, str(self.driver), str(self.library), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def best(self, cpu: str) -> str:
        """The instruction set that the library chooses on ``cpu``."""
        return self.isas[int(self.run(cpu=cpu))]

    def install(self, monkeypatch: pytest.MonkeyPatch, isa: str) -> None:
        """Redirect the package's calls to this library; pointers in a call's structure are recorded as it is filled."""
        self.isa = isa
        monkeypatch.setattr("linattn.ops.cpu.library.reason", lambda: None)
        monkeypatch.setattr("linattn.ops.cpu.library.call", self.call)
        for name in ("_addresses", "_strided"):
            monkeypatch.setattr(linear_attention, name, self.noting(getattr(linear_attention, name)))

    def noting(self, function):
        def noted(*tensors):
            self.tensors += [t for t in tensors if t is not None]
            return function(*tensors)

        return noted

    def call(self, name: str, *arguments: Tensor | float | None, numbers: int = 0) -> None:
        """As :func:`linattn.ops.cpu.library.call`, with all memory passed through a file."""
        tensors = [*self.tensors, *(x for x in arguments if isinstance(x, Tensor))]
        storages = {s.data_ptr(): s for s in (t.untyped_storage() for t in tensors) if s.nbytes()}
        places, content = {}, bytearray(4096)
        for start, storage in storages.items():
            places[start] = len(content)
            content += ctypes.string_at(start, storage.nbytes())
            content += bytes(-len(content) % 64 + 64)
        at = {t.data_ptr(): ADDRESS + places[s] + t.data_ptr() - s for t in tensors if (s := t.untyped_storage().data_ptr()) in places}
        integers, doubles = [], []
        for x in arguments:
            kind = doubles if isinstance(x, float) else integers
            kind.append(at.get(x.data_ptr(), 0) if isinstance(x, Tensor) else 0 if x is None else x)
        if name.startswith("linear_attention"):  # the address of a structure
            structure = ctypes.string_at(integers[0], linear_attention._Call._struct.size)
            words = [at.get(word, word) for (word,) in struct.iter_unpack("q", structure)]
            integers[0] = ADDRESS + len(content)
            content += struct.pack(f"{len(words)}q", *words)
        symbol = f"linattn_{name}_{self.isa if name.startswith('linear_attention') else 'portable'}"
        integers.append(2)  # threads
        integers, doubles = ([*x, *[0] * (n - len(x))] for x, n in ((integers, 80), (doubles, 4)))
        content[: HEADER.size] = HEADER.pack(symbol.encode(), *integers, *doubles)
        file = self.driver.with_name("memory")
        file.write_bytes(content)
        self.run(str(file), hex(ADDRESS))
        result = file.read_bytes()
        for start, storage in storages.items():
            ctypes.memmove(start, result[places[start] : places[start] + storage.nbytes()], storage.nbytes())
        self.calls.append(symbol)
        self.tensors = []
