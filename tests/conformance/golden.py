"""Write the golden file of state_dict names and shapes: ``python -m tests.conformance.golden [NAME...]``, without names all."""

from __future__ import annotations

import json
import sys

import linattn.mixers
from tests.conformance.checks.papers import GOLDEN, is_ours, names_and_shapes
from tests.conformance.tools import WIDTH


def main(*names: str) -> None:
    mixers = {name: linattn.mixers.create(name, dim=WIDTH) for name in names or linattn.mixers.available()}
    known = json.loads(GOLDEN.read_text(encoding="utf-8")) if names else {}
    known |= {name: names_and_shapes(m) for name, m in mixers.items() if is_ours(m)}
    rows = [
        f"  {json.dumps(name)}: {{\n"
        + ",\n".join(f"    {json.dumps(key)}: {json.dumps(shape)}" for key, shape in entries.items())
        + "\n  }"
        for name, entries in sorted(known.items())
    ]
    GOLDEN.write_text("{\n" + ",\n".join(rows) + "\n}\n", encoding="utf-8")
    print(f"{GOLDEN}: {', '.join(mixers)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
