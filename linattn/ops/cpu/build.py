"""Compile the CPU kernels into one shared library: ``python -m linattn.ops.cpu.build``. Needs only a C++ compiler.

Every source is compiled once for each instruction set without bfloat16 products; ``*_tiles.cpp`` only for those with them
(``TILES``), and the sources in ``ONCE`` once for all. The library's name contains a hash of the sources and compiler flags, so that a
stale one is never loaded; so do the names of objects, so that only changed sources are compiled again. This file imports nothing of
linattn, because the package's build runs it.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import cache
from pathlib import Path

NATIVE = Path(__file__).with_name("native")
BUILT = Path(__file__).with_name("built")
ONCE = ("pool.cpp", "isa.cpp", "sequence.cpp")
FLAGS = (
    "-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-pthread",
    "-Wall", "-Wextra", "-Wno-psabi", "-Wno-unknown-warning-option",
    "-Wno-maybe-uninitialized", "-Wno-uninitialized",  # false warnings of GCC for its own intrinsics
)  # fmt: skip
SANITIZE = (
    "-O1", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined",
    # The address sanitizer covers these checks, which would take four times as long to compile.
    "-fno-sanitize=null,alignment,object-size,pointer-overflow,vptr",
)  # fmt: skip
AVX2 = ("-mavx2", "-mfma", "-mf16c")
AVX512 = (*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl")
AVX512_BF16 = (*AVX512, "-mavx512vnni", "-mavx512bf16")  # no processor has the second without the first
# From the baseline to the best, in the order of isa.cpp.
X86 = {"portable": (), "avx2": AVX2, "avx512": AVX512, "avx512bf16": AVX512_BF16, "amx": (*AVX512_BF16, "-mamx-tile", "-mamx-bf16")}
ARM = {"portable": (), "neonbf16": ("-march=armv8.2-a+bf16",)}
KINDS = {"x86_64": X86, "amd64": X86, "aarch64": ARM, "arm64": ARM}
ISAS: dict[str, tuple[str, ...]] = KINDS.get(platform.machine().lower(), {"portable": ()})
TILES = ("avx512bf16", "amx", "neonbf16")  # instruction sets with bfloat16 products
# Linked statically with the C++ library, so that any system with this C library or a newer one can load it.
ALONE = ("-static-libstdc++", "-Wl,--exclude-libs,ALL", "-Wl,--gc-sections") if sys.platform == "linux" else ()
SUFFIX = ".dylib" if sys.platform == "darwin" else ".so"


class BuildError(Exception):
    """The library of kernels cannot be built; the message gives the reason."""


class NoCompilerError(BuildError):
    """No C++ compiler was found."""


def names(sanitize: bool = False) -> tuple[str, ...]:
    """Instruction sets of a library; a sanitized one omits AVX2, whose kernels are the portable ones with wider vectors."""
    return tuple(isa for isa in ISAS if not sanitize or isa != "avx2")


def sources() -> list[Path]:
    return sorted(NATIVE.glob("*.cpp"))


@cache
def key(sanitize: bool = False) -> str:
    """Hash of the sources, part of the file name of every library built from them."""
    how = (platform.machine(), sys.platform, FLAGS, ALONE, _extra(sanitize), [(isa, ISAS[isa]) for isa in names(sanitize)])
    digest = hashlib.sha256(repr(how).encode())
    for path in sorted(NATIVE.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def library(sanitize: bool = False) -> Path | None:
    """Path of the library of these sources; None if it is not built."""
    return next(iter(sorted(BUILT.glob(f"linattn-{key(sanitize)}-*{SUFFIX}"))), None)


def build(sanitize: bool = False) -> Path:
    """Build the library unless it exists; returns its path.

    Raises:
        BuildError: if it cannot be built; NoCompilerError: if there is no compiler.
    """
    if os.name == "nt":
        raise NoCompilerError("its kernels are compiled on Linux and macOS only")
    compiler, version = _compiler()
    path = BUILT / f"linattn-{key(sanitize)}-{_hash(version)}{SUFFIX}"
    if path.exists():
        return path
    BUILT.mkdir(exist_ok=True)
    isas = [name for name in names(sanitize) if _takes(compiler, ISAS[name])]
    print(f"linattn: compiling the CPU kernels with {version.splitlines()[0]}, for {', '.join(isas)}: this takes minutes", file=sys.stderr)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        jobs = [
            pool.submit(_object, compiler, source, isa, sanitize, _hash(version, *_texts(source)))
            for source in sources()
            for isa in _compiled_for(source, isas)
        ]
        for count, _ in enumerate(as_completed(jobs), 1):
            _show(count, len(jobs))
        objects = [job.result() for job in jobs]
    with _finished(path) as half:
        _link([*compiler, *_extra(sanitize), "-shared", "-pthread", "-o", str(half), *map(str, objects)], () if sanitize else ALONE)
    _tidy(path, objects, sanitize)
    return path


def _show(count: int, total: int) -> None:
    """Report progress on stderr: one line that is rewritten on a terminal, else about ten lines."""
    terminal = sys.stderr.isatty()
    if terminal or count == total or count % max(1, total // 10) == 0:
        end = "\n" if count == total or not terminal else ""
        print(f"{chr(13) if terminal else ''}linattn: {count} of {total} objects compiled", end=end, file=sys.stderr, flush=True)


def _compiled_for(source: Path, isas: list[str]) -> list[str]:
    if source.name in ONCE:
        return ["portable"]
    return [isa for isa in isas if (isa in TILES) == source.stem.endswith("_tiles")]


def _texts(source: Path) -> list[str]:
    """Texts of ``source`` and of all headers that it includes, directly or through others."""
    texts: dict[str, str] = {}
    wanted = [source.name]
    while wanted:
        name = wanted.pop()
        if name not in texts:
            texts[name] = (NATIVE / name).read_text(encoding="utf-8")
            wanted += re.findall(r'^#include "(.+)"', texts[name], re.MULTILINE)
    return [texts[name] for name in sorted(texts)]


def _object(compiler: list[str], source: Path, isa: str, sanitize: bool, context: str) -> Path:
    """Compile ``source`` for ``isa`` unless the object exists; returns its path."""
    flags = [*FLAGS, *_extra(sanitize), *ISAS[isa], f"-DLINATTN_ISA={isa}"]
    kind = f"{source.stem}-{isa}-{'sanitized' if sanitize else 'plain'}"
    path = BUILT / f"{kind}-{_hash(context, repr(flags))}.o"
    if not path.exists():
        with _finished(path) as half:
            _run([*compiler, *flags, "-c", str(source), "-o", str(half)])
    return path


def _link(command: list[str], alone: tuple[str, ...]) -> None:
    """Run ``command`` with the flags ``alone``, or without them if the system has no static libraries."""
    try:
        _run([*command, *alone])
    except BuildError:
        _run(command)


def _tidy(path: Path, objects: list[Path], sanitize: bool) -> None:
    """Remove libraries and objects of older sources."""
    kept = {path, *objects}
    for old in BUILT.glob(f"*-{'sanitized' if sanitize else 'plain'}-*.o"):
        if old not in kept:
            old.unlink(missing_ok=True)
    for old in BUILT.glob(f"linattn-*{SUFFIX}"):
        if not old.name.startswith((f"linattn-{key(False)}-", f"linattn-{key(True)}-")):
            old.unlink(missing_ok=True)


def _extra(sanitize: bool) -> tuple[str, ...]:
    return SANITIZE if sanitize else ()


def _compiler() -> tuple[list[str], str]:
    """Command of the compiler, and its version text."""
    tried = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    for command in map(shlex.split, tried):
        if shutil.which(command[0]):
            said = subprocess.run([*command, "--version"], capture_output=True, text=True, check=False)
            if said.returncode == 0:
                return command, said.stdout
    raise NoCompilerError(f"there is no C++ compiler ({', '.join(tried)}) for its kernels; install g++ or clang++, or name one by CXX")


def _takes(compiler: list[str], flags: tuple[str, ...]) -> bool:
    """True if ``compiler`` supports ``flags``."""
    if not flags:
        return True
    command = [*compiler, *flags, "-x", "c++", "-fsyntax-only", "-"]
    return subprocess.run(command, input="", capture_output=True, text=True, check=False).returncode == 0


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BuildError(f"its kernels could not be compiled: {shlex.join(command)}\n{done.stderr}")
    sys.stderr.write(done.stderr)  # warnings


@contextlib.contextmanager
def _finished(path: Path) -> Iterator[Path]:
    """Yield a temporary file beside ``path``, and rename it to ``path`` on success."""
    handle, half = tempfile.mkstemp(dir=path.parent, prefix=".half-", suffix=path.suffix)
    os.close(handle)
    try:
        yield Path(half)
        Path(half).chmod(0o755 if path.suffix == SUFFIX else 0o644)
        Path(half).replace(path)
    finally:
        Path(half).unlink(missing_ok=True)


def _hash(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def main() -> int:
    """Build and print the path. A missing compiler is reported but not an error, because the portable form remains."""
    parser = argparse.ArgumentParser(prog="python -m linattn.ops.cpu.build", description="Compile the CPU kernels.")
    parser.add_argument("--sanitize", action="store_true", help="with the address and undefined behaviour sanitizers, beside the usual one")
    try:
        print(build(parser.parse_args().sanitize))
    except BuildError as error:
        print(f"linattn: the portable form will be used on the CPU: {error}", file=sys.stderr)
        return 0 if isinstance(error, NoCompilerError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
