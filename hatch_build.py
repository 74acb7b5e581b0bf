"""Compile the CPU kernels into what is built: a wheel for this platform, or one for all where there is no compiler."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from packaging.tags import sys_tags

EVERYWHERE = {b"libc.so.6", b"libm.so.6", b"libpthread.so.0", b"libdl.so.2", b"librt.so.1", b"libgcc_s.so.1"}  # of glibc and beside it


class Kernels(BuildHookInterface):
    """Asks ``linattn/ops/cpu/build.py``, which imports nothing of the package."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build the library, and put it into a wheel that is no editable one."""
        folder = Path(self.root, "linattn", "ops", "cpu")
        native = runpy.run_path(str(folder / "build.py"))
        try:
            library = native["build"]()
        except native["BuildError"] as error:
            self.app.display_warning(f"the portable form will be used on the CPU: {error}")
            return
        if version == "standard":
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{_platform(library)}"
            build_data["force_include"][str(library)] = library.relative_to(self.root).as_posix()


def _platform(library: Path) -> str:
    """Linux with the C library that ``library`` wants, if it brings the rest along; else this system, without a promise of others."""
    own = next(tag.platform for tag in sys_tags() if "many" not in tag.platform and "musl" not in tag.platform)
    content = library.read_bytes()
    versions = [(int(major), int(minor)) for major, minor in re.findall(rb"\0GLIBC_(\d+)\.(\d+)", content)]
    others = set(re.findall(rb"\0(lib[\w+.-]+\.so[.\d]*)(?=\0)", content)) - EVERYWHERE
    if not own.startswith("linux_") or not versions or others:
        return own
    return own.replace("linux_", "manylinux_{}_{}_".format(*max(versions)), 1)
