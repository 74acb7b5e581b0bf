"""Program that draws docs/images/speed.svg from the measured data: ``python benchmarks/plots.py``. A test says when it is old."""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = "benchmarks/results/ops-h200.json"
TARGET = ROOT / "docs" / "images" / "speed.svg"
FAMILIES = {"constant": "RetNet", "channel": "GLA", "delta": "DeltaNet", "kda": "KDA", "erase": "RWKV-7", "selective_scan": "Mamba"}
SHAPE, LEFT, WIDTH, BAR = "B1 T32768 H16 D128", 90, 440, 15
COLOURS = {"linattn": "#2a6f97", "other": "#b0a18f"}  # both are seen on white and on black


def times() -> list[tuple[str, float, float, str]]:
    """Name of the recurrence, our milliseconds forward and backward, those of the fastest other library, and its name."""
    rows = json.loads((ROOT / SOURCE).read_text(encoding="utf-8"))["rows"]
    found = []
    for family, name in FAMILIES.items():
        decay = -0.05 if family in ("channel", "kda", "erase") else None
        timed = {
            row["library"]: row["ms"]
            for row in rows
            if (row["family"], row["shape"], row["mode"], row["decay"]) == (family, SHAPE, "forward+backward", decay)
            and row["decay_dtype"] in (None, "bfloat16")
            and row["ms"] is not None
        }
        ours = timed.pop("linattn")
        library = min(timed, key=timed.__getitem__)
        found.append((name, ours, timed[library], library))
    return found


def drawing() -> str:
    """SVG with two bars for each recurrence."""
    rows = times()
    scale = WIDTH / max(theirs for _, _, theirs, _ in rows)
    lines = []
    for i, (name, ours, theirs, library) in enumerate(rows):
        top = 34 + i * (2 * BAR + 14)
        lines.append(f'<text x="{LEFT - 8}" y="{top + BAR + 4}" text-anchor="end">{name}</text>')
        for j, (label, ms, colour) in enumerate((("linattn", ours, "linattn"), (library, theirs, "other"))):
            y = top + j * BAR
            lines.append(f'<rect x="{LEFT}" y="{y}" width="{ms * scale:.1f}" height="{BAR - 2}" fill="{COLOURS[colour]}"/>')
            lines.append(f'<text x="{LEFT + ms * scale + 6:.1f}" y="{y + BAR - 4}">{ms:.2f} {label}</text>')
    height = 34 + len(rows) * (2 * BAR + 14)
    title = "Forward and backward, milliseconds: B 1, T 32,768, 16 heads of 128, bfloat16, NVIDIA H200"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + 130} {height}" role="img" font-family="sans-serif"'
    style = "<style>text{fill:#333}@media (prefers-color-scheme:dark){text{fill:#ccc}}</style>"
    return "\n".join(
        [f'{head} font-size="12">', style, f"<title>{title}</title>", f'<text x="8" y="18">{title}</text>', *lines, "</svg>\n"]
    )


if __name__ == "__main__":
    TARGET.write_text(drawing(), encoding="utf-8")
