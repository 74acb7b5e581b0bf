"""Write the golden file of state_dict names and shapes anew: ``python -m tests.conformance.golden``."""

from __future__ import annotations

import json

import linattn.mixers
from tests.conformance.checks.papers import GOLDEN, is_ours, names_and_shapes
from tests.conformance.tools import WIDTH


def main() -> None:
    mixers = {name: linattn.mixers.create(name, dim=WIDTH) for name in linattn.mixers.available()}
    known = {name: names_and_shapes(m) for name, m in mixers.items() if is_ours(m)}
    rows = [
        f"  {json.dumps(name)}: {{\n"
        + ",\n".join(f"    {json.dumps(key)}: {json.dumps(shape)}" for key, shape in entries.items())
        + "\n  }"
        for name, entries in known.items()
    ]
    GOLDEN.write_text("{\n" + ",\n".join(rows) + "\n}\n", encoding="utf-8")
    print(f"{GOLDEN}: {', '.join(known)}")


if __name__ == "__main__":
    main()
