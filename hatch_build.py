"""Compile the CPU kernels into what is built: a wheel for this platform, or one for all where there is no compiler."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from packaging.tags import sys_tags


class Kernels(BuildHookInterface):
    """Asks ``linattn/ops/cpu/build.py``, which imports nothing of the package."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build the library, and put it into a wheel that is no editable one."""
        folder = Path(self.root, "linattn", "ops", "cpu")
        native = runpy.run_path(str(folder / "build.py"))
        try:
            library = native["build"]()
        except native["BuildError"] as error:
            self.app.display_warning(f"the portable form will serve on the CPU: {error}")
            return
        if version == "standard":
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{_platform()}"
            build_data["force_include"][str(library)] = library.relative_to(self.root).as_posix()


def _platform() -> str:
    """This system, without a promise of which others: whoever publishes wheels for many adds it with the tools for that."""
    return next(tag.platform for tag in sys_tags() if "many" not in tag.platform and "musl" not in tag.platform)
