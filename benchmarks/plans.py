"""Program ``python -m benchmarks.plans``: plans of trainings on 64 and on 1,024 H200 by ``linattn plan``, as a table.
Links have 390 GB/s, as measured between two H200 of one host, and 50 GB/s (400 Gb/s) between nodes of eight; computation
reaches two fifths of the peak. No such training has been run.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from linattn.report.words import memory
from linattn.train.plan import plan
from linattn.train.plan_options import PlanOptions

RESULTS = Path(__file__).parent / "results" / "plans.csv"
COLUMNS = ("model", "context", "cards", "dp x cp x tp", "a card holds", "it sends a step", "tokens a step", "a step, s", "tokens/s")
SMALL: dict[str, Any] = {"dim": 2048, "layers": 24, "heads": 16}
LARGE: dict[str, Any] = {"dim": 4096, "layers": 32, "heads": 32, "mixer_options": {"softmax": {"kv_heads": 8}}}
HYBRID = "gated_deltanet*3, softmax"
MODELS: dict[str, dict[str, Any]] = {
    "gla": {**SMALL, "mixer": "gla"},
    "gated_deltanet": {**LARGE, "mixer": "gated_deltanet", "mixer_options": {}},
    HYBRID: {**LARGE, "mixer": HYBRID},
}
MESHES = (
    ("gla", {"context": 4096, "batch_size": 8, "dp": 64}),
    ("gla", {"context": 4096, "batch_size": 8, "dp": 1024}),
    (HYBRID, {"context": 32_768, "batch_size": 1, "dp": 64}),
    (HYBRID, {"context": 32_768, "batch_size": 1, "dp": 512, "tp": 2}),
    ("gated_deltanet", {"context": 1 << 20, "batch_size": 1, "dp": 8, "cp": 8}),
    ("gated_deltanet", {"context": 1 << 20, "batch_size": 1, "dp": 128, "cp": 8}),
    ("gated_deltanet", {"context": 1 << 23, "batch_size": 1, "dp": 1, "cp": 64}),
)


def rows() -> list[list[str]]:
    """One line for each plan."""
    found = []
    for name, mesh in MESHES:
        options = PlanOptions(**{**MODELS[name], **mesh, "fsdp": True, "checkpoint_activations": True})
        made = plan(options)
        step = made.seconds["step"]
        found.append([
            f"{name}, {made.parameters / 1e9:.1f}B", f"{options.context:,}", f"{made.cards:,}",
            f"{options.dp} x {options.cp} x {options.tp}", memory(made.total), memory(sum(made.traffic.values())), f"{made.tokens:,}",
            f"{step:.2f}", f"{made.tokens / step:,.0f}",
        ])  # fmt: skip
    return found


def main() -> None:
    with RESULTS.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(rows())
    print(RESULTS.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
