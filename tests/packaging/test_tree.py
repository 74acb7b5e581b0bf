"""Tracked files: no paths of one machine, a complete lock, valid metadata."""

import re
import tomllib

import pytest
import yaml

import linattn
from tests.packaging.tree import ROOT, files

MACHINE = re.compile(r"(?<![\w.~$}-])/(?:root|work|farm|home/\w+|Users/\w+|tmp/\w+)/")
HOSTS = re.compile(r"(?:\bpypi\.org|pythonhosted\.org|download\.pytorch\.org|\banaconda\.org|\bindex-url=?\s*https?:)")


def text(path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return ""


@pytest.mark.parametrize("pattern", [MACHINE, HOSTS], ids=["paths", "hosts"])
def test_no_file_names_a_machine_or_a_registry(pattern):
    found = [f"{p.relative_to(ROOT)}: {m[0]}" for p in files() for m in [pattern.search(text(p))] if m]
    assert found == []


@pytest.mark.parametrize("path", ["/ro" + "ot/x", "see /wo" + "rk/main", "'/ho" + "me/me/x'", "(/tm" + "p/a/b)"])
def test_the_pattern_finds_paths(path):
    assert MACHINE.search(path) and not MACHINE.search(path.replace("/", "a/", 1))


def test_the_lock_is_hashed_and_has_no_torch():
    lines = (ROOT / "requirements.lock").read_text().replace("\\\n", " ").splitlines()
    entries = [line for line in lines if not line.startswith("#")]
    assert entries and all(re.match(r"[\w.-]+==\S+ .*--hash=sha256:[0-9a-f]{64}", line) for line in entries)
    names = {line.partition("==")[0].lower() for line in entries}
    assert not {n for n in names if n in ("torch", "linattn") or n.startswith(("nvidia-", "cuda-"))}


def test_the_lock_covers_what_the_suite_asks_for():
    locked = {line.partition("==")[0].lower() for line in (ROOT / "requirements.lock").read_text().splitlines() if "==" in line}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    asked = [*project["dependencies"], *extras["test"], *extras["train"], *extras["hf"], *extras["docs"]]
    names = {re.match(r"[\w-]+", line)[0].lower() for line in asked} - {"torch", "linattn"}
    assert names <= locked


def test_the_licence_of_every_dependency_is_listed():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [line for name, lines in project["optional-dependencies"].items() if name not in ("test", "docs", "release") for line in lines]
    names = {re.match(r"[\w-]+", line)[0] for line in [*project["dependencies"], *extras]} - {"linattn"}
    listed = (ROOT / "THIRD_PARTY.md").read_text()
    assert [name for name in names if not re.search(rf"\b{name}\b", listed)] == []


def test_the_data_of_the_package_are_listed():
    listed = (ROOT / "THIRD_PARTY.md").read_text()
    data = [p.relative_to(ROOT) for p in files() if p.is_relative_to(ROOT / "linattn") and p.suffix == ".json"]
    assert data and [str(p) for p in data if f"`{p}`" not in listed and f"`{p.parent}/*.json`" not in listed] == []


def test_the_citation_is_valid_and_of_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors", "license", "type"} <= set(citation)
    assert citation["license"] == "Apache-2.0" and citation["version"] == linattn.__version__


def test_the_changelog_has_a_place_for_the_next_version():
    assert "## [Unreleased]" in (ROOT / "CHANGELOG.md").read_text()
