"""The lock gives every supported Python each package once."""

import re

import pytest
from packaging.requirements import Requirement

from tests.packaging.tree import ROOT

LOCK = (ROOT / "requirements.lock").read_text(encoding="utf-8")
BACKPORTS = {"backports-tarfile", "importlib-metadata", "lazy-importer", "zipp"}  # backports for Python before 3.12
PINNED = [Requirement(line) for line in re.findall(r"^([\w.-]+==[^\\\n]+?) \\$", LOCK, re.M)]


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13", "3.14"])
def test_each_python_gets_each_package_once(python):
    there = {"python_version": python, "python_full_version": f"{python}.1", "sys_platform": "linux", "platform_system": "Linux"}
    chosen = [pin.name for pin in PINNED if pin.marker is None or pin.marker.evaluate(there)]
    assert sorted(chosen) == sorted({pin.name for pin in PINNED} - (set() if python == "3.11" else BACKPORTS))
