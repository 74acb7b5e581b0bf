"""Checks of a mixer's registration, its oracle and its frozen names."""

from __future__ import annotations

import json
import re
from pathlib import Path

from linattn.mixers import Mixer
from linattn.mixers.registry import KINDS
from tests.conformance.tools import Make, build

GOLDEN = Path(__file__).parents[1] / "golden_state_dict.json"
COMMAND = "python -m tests.conformance.golden"
ORACLES = Path(__file__).parents[2] / "oracles"


def is_ours(mixer: Mixer) -> bool:
    """True for the project's own mixers; third parties have their own oracles and golden files."""
    return type(mixer).__module__.startswith("linattn.")


def check_info(make: Make) -> None:
    """The entry in the register is complete."""
    from tests.conformance.checks import NAMES

    info = build(make).info
    for field in ("name", "title", "paper", "equation", "oracle"):
        value = getattr(info, field)
        assert isinstance(value, str) and value.strip() == value != "", f"{field} is {value!r}"
    assert re.fullmatch(r"[a-z][a-z0-9_]*", info.name), f"name {info.name!r} must be lower case with underscores"
    assert info.kind in KINDS
    assert 1950 <= info.year <= 2100, f"year is {info.year}"
    assert info.arxiv is None or re.fullmatch(r"\d{4}\.\d{4,5}", info.arxiv), f"arxiv is {info.arxiv!r}"
    assert info.arxiv is None or abs(2000 + int(info.arxiv[:2]) - info.year) <= 1, f"arXiv {info.arxiv} is not of the year {info.year}"
    assert info.equation.count("{") == info.equation.count("}"), "the equation's braces do not pair"
    for check, reason in info.exemptions.items():
        assert check in NAMES, f"exempt from {check!r}, which is no check; there are {', '.join(NAMES)}"
        assert len(reason.split()) > 3, f"the exemption from {check!r} has no reason"


def check_oracle(make: Make) -> None:
    """One of the project's own mixers has a test against an independent implementation, of its own or test_one_and_another.py."""
    mixer = build(make)
    name = mixer.info.name
    if is_ours(mixer):
        files = [path for path in ORACLES.glob("test_*.py") if name in path.stem.removeprefix("test_").split("_and_")]
        assert files, f"there is no tests/oracles/test_{name}.py"
        assert re.search(r"^def test_", files[0].read_text(encoding="utf-8"), re.MULTILINE), f"tests/oracles/{files[0].name} has no test"


def names_and_shapes(mixer: Mixer) -> dict[str, list[int]]:
    return {name: list(t.shape) for name, t in mixer.state_dict().items()}


def check_golden(make: Make) -> None:
    """The names and shapes in ``state_dict`` are part of the API: they must match the golden file."""
    mixer = build(make)
    if not is_ours(mixer) or mixer.causal != mixer.info.causal:  # the file has the names with default options
        return
    golden = json.loads(GOLDEN.read_text(encoding="utf-8")).get(mixer.info.name)
    assert golden is not None, f"{GOLDEN.name} does not know {mixer.info.name!r}; run `{COMMAND}`"
    ours = names_and_shapes(mixer)
    changed = sorted(name for name in {*ours, *golden} if ours.get(name) != golden.get(name))
    assert not changed, f"not as in {GOLDEN.name}: {changed}; weights saved by users would not load. If it is meant: `{COMMAND}`"
