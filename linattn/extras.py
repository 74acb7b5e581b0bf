"""Optional packages: how to install a missing one, from the metadata of this package."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version

EXTRAS = {"sklearn": "vision", "pyarrow": "parquet", "gguf": "gguf"}  # extra of a package; default "train"
_DISTRIBUTIONS = {"sklearn": "scikit-learn", "yaml": "pyyaml"}  # by import name, where they differ


def missing(package: str, user: str = "this command") -> str:
    """Error line for a missing ``package``, by its import name, that ``user`` needs.

    It names the requirements rather than linattn's extra, since they can be installed wherever linattn came from.
    """
    name = _DISTRIBUTIONS.get(package, package)
    wanted = dict(requirements(EXTRAS.get(package, "train")))
    absent = [line for one, line in wanted.items() if one != name and not _installed(one)] if name in wanted else []
    return f"{package} is not installed; {user} needs it: pip install {' '.join([wanted.get(name, name), *absent])}"


def requirements(extra: str) -> Iterator[tuple[str, str]]:
    """Distributions of ``extra`` and of the extras that it includes: the name, and the requirement quoted for a shell."""
    try:
        lines = requires("linattn") or []
    except PackageNotFoundError:  # not installed, run from its sources
        return
    for line in lines:
        words, _, marker = (part.strip() for part in line.partition(";"))
        if not re.search(rf"extra == ['\"]{extra}['\"]", marker):
            continue
        name = re.split(r"[\s<>=!~\[]", words, maxsplit=1)[0].lower()
        if name == "linattn":
            yield from requirements(words.partition("[")[2].rstrip("]"))
        else:
            yield name, words if words == name else f"'{words}'"


def _installed(distribution: str) -> bool:
    try:
        version(distribution)
    except PackageNotFoundError:
        return False
    return True
