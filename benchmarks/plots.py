"""Program that draws docs/images/speed.svg and losses.svg from the measured data: ``python benchmarks/plots.py``.

A test fails if they are outdated.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from linattn.bench.gpu.cases import PASSES, SHAPES, Case
from linattn.report.scales import Scale, linear, logarithmic

ROOT = Path(__file__).parents[1]
SOURCE = "benchmarks/results/ops-h200.json"
TARGET = ROOT / "docs" / "images" / "speed.svg"
# Recurrences of the front page.
FRONT = {"channel": "GLA", "delta": "DeltaNet", "gated_delta": "Gated DeltaNet", "kda": "KDA", "erase": "RWKV-7", "selective_scan": "Mamba"}
LEFT, WIDTH, BAR = 110, 440, 15
LOSSES, LOSSES_TARGET = "benchmarks/results/losses-h200.json", ROOT / "docs" / "images" / "losses.svg"
PANEL, GAP, MARGIN = (300, 200), (70, 62), (52, 64)  # width and height of a plot of losses, space between them, and around all
LINES = {  # visible on white and on black
    "softmax": "#8a8a8a", "gla": "#2a6f97", "gated_deltanet": "#c8553d", "mamba2": "#7b9e2f", "rwkv7": "#8e5ea2", "hybrid": "#d08c1d",
}  # fmt: skip
SPAN = 0.6  # bits per byte above the lowest loss that plots show
COLOURS = {"linattn": "#2a6f97", "other": "#b0a18f"}  # both are visible on white and on black


def times() -> list[tuple[str, float, float, str]]:
    """Name of the recurrence, our milliseconds forward and backward, those of the fastest other library, and its name."""
    rows = json.loads((ROOT / SOURCE).read_text(encoding="utf-8"))["rows"]
    found = []
    for family, name in FRONT.items():
        case = Case.of(family, SHAPES[0], PASSES[1])
        timed = {
            row["library"]: row["ms"]
            for row in rows
            if (row["family"], row["shape"], row["mode"], row["decay"]) == (family, str(case.shape), case.mode, case.decay)
            and row["decay_dtype"] == case.decay_dtype
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
    return _svg(LEFT + WIDTH + 130, height, title, lines)


def _svg(width: float, height: float, title: str, lines: Sequence[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" font-family="sans-serif"'
    style = (
        "<style>text{fill:#333}line,polyline{stroke:#8885}@media (prefers-color-scheme:dark){text{fill:#ccc}}</style>"
        if any("<line" in line for line in lines)
        else "<style>text{fill:#333}@media (prefers-color-scheme:dark){text{fill:#ccc}}</style>"
    )
    return "\n".join(
        [f'{head} font-size="12">', style, f"<title>{title}</title>", f'<text x="8" y="18">{title}</text>', *lines, "</svg>\n"]
    )


@dataclass(frozen=True)
class Panel:
    """Plot of losses: its title, the axis below, and points of each model."""

    title: str
    below: str
    x: Scale
    series: dict[str, list[tuple[float, float]]]

    def lines(self, left: float, top: float) -> list[str]:
        """Elements of the drawing."""
        width, height = PANEL
        lowest = min(y for points in self.series.values() for _, y in points)
        highest = max(y for points in self.series.values() for _, y in points)
        y = linear([lowest, min(highest, lowest + SPAN)])
        out = [f'<text x="{left}" y="{top - 10}" font-weight="bold">{self.title}</text>']
        for tick in y.ticks:
            at = top + height * (1 - y(tick))
            out.append(f'<line x1="{left}" x2="{left + width}" y1="{at:.1f}" y2="{at:.1f}"/>')
            out.append(f'<text x="{left - 6}" y="{at + 4:.1f}" text-anchor="end">{tick:.2f}</text>')
        out += [
            f'<text x="{left + width * self.x(tick):.1f}" y="{top + height + 16}" text-anchor="middle">{tick:g}</text>'
            for tick in self.x.ticks
        ]
        out.append(f'<text x="{left + width / 2}" y="{top + height + 32}" text-anchor="middle">{self.below}</text>')
        for name, points in self.series.items():
            seen = [(a, b) for a, b in points if b <= y.high]
            path = " ".join(f"{left + width * self.x(a):.1f},{top + height * (1 - y(b)):.1f}" for a, b in seen)
            out.append(f'<polyline points="{path}" fill="none" stroke-width="1.8" style="stroke:{LINES[name]}"/>')
            if len(points) < 4:
                out += [f'<circle cx="{at.split(",")[0]}" cy="{at.split(",")[1]}" r="3" fill="{LINES[name]}"/>' for at in path.split()]
        return out


def panels(body: dict) -> list[Panel]:
    """Loss against tokens and seconds at each width, and against parameters."""
    found = []
    rows = {(r["model"], r["dim"]): r for r in body["rows"] if r["steps"] == body["steps"] and "failure" not in r}
    for dim in body["dims"]:
        here = {name: rows[name, dim] for name in body["mixers"] if (name, dim) in rows}
        size = round(sum(r["parameters"] for r in here.values()) / len(here) / 1e6)
        tokens, seconds = (
            {name: [(h["tokens"] / per(r), h["validation_bits_per_byte"]) for h in r["history"] if h["tokens"]] for name, r in here.items()}
            for per in (lambda r: 1e6, lambda r: r["tokens_per_second"])
        )
        for below, series in (("million tokens", tokens), ("seconds", seconds)):
            x = linear([a for points in series.values() for a, _ in points], zero=True)
            found.append(Panel(f"{size} million parameters", below, x, series))
    ends = {
        name: [(r["parameters"] / 1e6, r["history"][-1]["validation_bits_per_byte"]) for d in body["dims"] if (r := rows.get((name, d)))]
        for name in body["mixers"]
    }
    ends = {name: points for name, points in ends.items() if points}
    x = logarithmic([a for points in ends.values() for a, _ in points])
    return [*found, Panel("After the last token", "million parameters", x, ends)]


def first_width_done(body: dict) -> bool:
    """True if every model of :mod:`benchmarks.losses` has finished its training at the first width; else nothing is shown of it."""
    done = {r["model"] for r in body["rows"] if r["steps"] == body["steps"] and r["dim"] == body["dims"][0] and "failure" not in r}
    return done == set(body["mixers"])


def losses(body: dict) -> str:
    """SVG with the validation losses of the trainings in ``body``, in two columns."""
    lines: list[str] = []
    (left, top), (width, height), (across, down) = MARGIN, PANEL, GAP
    for i, panel in enumerate(panels(body)):
        lines += panel.lines(left + i % 2 * (width + across), top + i // 2 * (height + down))
    legend, row = left + width + across, top + len(body["dims"]) * (height + down)
    for i, name in enumerate(body["mixers"]):
        text = name if name == body["mixers"][name] else f"{name}: {body['mixers'][name]}"
        lines.append(f'<rect x="{legend}" y="{row + 22 * i}" width="14" height="4" fill="{LINES[name]}"/>')
        lines.append(f'<text x="{legend + 22}" y="{row + 22 * i + 6}">{text}</text>')
    title = f"Bits per byte of held-out text, {body['card']}"
    return _svg(left + 2 * width + across + 24, row + height + down, title, lines)


def drawings() -> dict[Path, str]:
    """Text of every drawing whose data exist."""
    source = ROOT / LOSSES
    body = json.loads(source.read_text(encoding="utf-8")) if source.is_file() else None
    known = {LOSSES_TARGET: losses(body)} if body is not None and first_width_done(body) else {}
    return {TARGET: drawing(), **known}


if __name__ == "__main__":
    for path, text in drawings().items():
        path.write_text(text, encoding="utf-8")
