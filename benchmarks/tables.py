"""Write the tables of both READMEs from the measured data: ``python benchmarks/tables.py``."""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).parents[1]
START, END = "<!-- from benchmarks/results/ops-cpu.json -->\n", "<!-- end -->"
TITLES = {
    "README.md": ("beside", "pass", "tokens", "linattn, ms", "the other, ms", "median of ratios", "aim"),
    "README.zh.md": ("对比对象", "计算", "token 数", "linattn（毫秒）", "对方（毫秒）", "比值中位数", "目标"),
}


def table(titles: tuple[str, ...]) -> str:
    """The rows that have an aim."""
    rows = json.loads((ROOT / "benchmarks/results/ops-cpu.json").read_text(encoding="utf-8"))["rows"]
    lines = [f"| {' | '.join(titles)} |", f"|{'---|' * len(titles)}"]
    for r in rows:
        if r["target"] is not None:
            figures = (f"{r['ours_ms']:.0f}", f"{r['theirs_ms']:.0f}", f"{r['ratio']:.2f}", f"{r['target']:.2g}")
            lines.append(f"| {' | '.join((r['what'], r['mode'], str(r['tokens']), *figures))} |")
    return "\n".join(lines) + "\n"


def filled(name: str) -> str:
    """The README ``name`` with its table made anew."""
    before, rest = (ROOT / name).read_text(encoding="utf-8").split(START)
    return before + START + table(TITLES[name]) + rest[rest.index(END) :]


if __name__ == "__main__":
    for name in TITLES:
        (ROOT / name).write_text(filled(name), encoding="utf-8")
