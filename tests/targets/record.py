"""File of compiled kernels by Triton's version, card and case."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SCHEMA = "linattn.targets"
LEAST = 512  # negligible bytes of spills per thread
MARGIN = 1.25  # of the recorded spills, beyond which a case fails

Kernels = list[dict[str, Any]]


@dataclass
class Record:
    """The results of one version of Triton; those of others are preserved."""

    version: str
    before: dict[str, Any]
    cases: dict[str, dict[str, Kernels]] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path, version: str) -> Record:
        before = json.loads(path.read_text()) if path.exists() else {"schema": SCHEMA, "runs": {}}
        run = before["runs"].get(version, {})
        return cls(version, before, {target: dict(cases) for target, cases in run.get("targets", {}).items()})

    def has(self, target: str, case: str) -> bool:
        return case in self.cases.get(target, {})

    def add(self, target: str, case: str, kernels: list[Any]) -> None:
        rows = [{name: value for name, value in kernel._asdict().items() if value} for kernel in kernels]
        self.cases.setdefault(target, {})[case] = rows

    def spilled(self, target: str, case: str, kernel: Any) -> str | None:
        """Reason why a kernel spills too much, compared with the file."""
        run = self.before["runs"].get(self.version, {})
        known = run.get("targets", {}).get(target, {}).get(case, [])
        bound = max((k.get("spills", 0) for k in known if k["name"] == kernel.name), default=None)
        if bound is None or kernel.spills <= max(LEAST, MARGIN * bound):
            return None
        return f"{kernel.name} spills {kernel.spills} bytes a thread, and spilled {bound}"

    def write(self, path: Path, **facts: str) -> None:
        targets = {target: dict(sorted(cases.items())) for target, cases in sorted(self.cases.items())}
        runs = {**self.before["runs"], self.version: {**facts, "targets": targets}}
        path.write_text(_lines({"schema": SCHEMA, "runs": dict(sorted(runs.items()))}) + "\n", encoding="utf-8")


def merge(path: Path, others: list[Path]) -> str:
    """Add the cases in the files ``others`` to those in ``path``; later files take precedence for the same Triton and card."""
    added = 0
    for body in [json.loads(other.read_text()) for other in others]:
        if body["schema"] != SCHEMA:
            raise ValueError(f"its schema is {body['schema']!r}, not {SCHEMA!r}")
        for version, run in body["runs"].items():
            record = Record.read(path, version)
            for target, cases in run["targets"].items():
                record.cases.setdefault(target, {}).update(cases)
                added += len(cases)
            dates = sorted({*record.before["runs"].get(version, run)["date"].split(" to "), *run["date"].split(" to ")})
            facts = {**{name: value for name, value in run.items() if name != "targets"}, "date": " to ".join(dates[:1] + dates[1:][-1:])}
            record.write(path, **facts)
    return f"{added} cases added to {path.name}"


def _lines(value: Any, depth: int = 0) -> str:
    """JSON with one case per line."""
    if not isinstance(value, dict) or depth > 4:
        return json.dumps(value)
    inner = [f"{' ' * (depth + 1)}{json.dumps(key)}: {_lines(x, depth + 1)}" for key, x in value.items()]
    return "{\n" + ",\n".join(inner) + f"\n{' ' * depth}}}"
