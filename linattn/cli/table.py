"""Tables on stdout: formatted on a terminal, else tab-separated."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from linattn.generate.text import printable
from linattn.report.words import figure, memory, tokens

if TYPE_CHECKING:
    from linattn.compare.tasks import Task
    from linattn.experiment.study import Column

COLUMNS = (
    "mixer", "parameters", "ffn_dim", "bits_per_byte", "train_tokens_per_s", "train_s", "context", "prefill_ms", "decode_ms", "state_bytes",
    "learning_rate", "bits_per_byte_spread",
)  # fmt: skip


def show(report: dict) -> None:
    """Print a table and the samples on a terminal; elsewhere a header and one line for each mixer and context."""
    if sys.stdout.isatty():
        _terminal(report)
    else:
        print("\t".join(COLUMNS))
        for line in lines(report):
            print("\t".join(line))


def lines(report: dict) -> list[tuple[str, ...]]:
    """Rows for :data:`COLUMNS` with unrounded figures; "-" for measurements that were left out."""
    rows: list[tuple[str, ...]] = []
    for m in report["mixers"]:
        t, spread = m["training"], m["training"]["validation_bits_per_byte_spread"]
        start = (m["name"], str(m["parameters"]), str(m["ffn_dim"]), f"{t['validation_bits_per_byte']:.4f}",
                 f"{t['tokens_per_second']:.1f}", f"{t['seconds']:.2f}")  # fmt: skip
        end = (f"{t['learning_rate']:g}", "-" if spread is None else f"{spread:.4f}")
        rows += [
            (*start, str(c["context"]), f"{c['prefill_ms']:.3f}", f"{c['decode_ms']:.3f}", str(c["state_bytes"]), *end)
            for c in m["contexts"]
        ]
        rows += [(*start, str(x["context"]), "-", "-", "-", *end) for x in m["left_out"]]
    return rows


def _terminal(report: dict) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from linattn.reproduce.variants import label

    console = Console()
    first, last = (f(c["context"] for m in report["mixers"] for c in m["contexts"]) for f in (min, max))
    heads = ["mixer", "bits per byte", "training\ntokens/s"]
    for what in ("prefill\nms", "decode\nms/token", "state"):
        heads += [f"{what}\nat {tokens(c)}" for c in dict.fromkeys((first, last))]
    table = Table(*heads, box=None, header_style="bold", pad_edge=False, collapse_padding=True)
    for column in table.columns[1:]:
        column.justify = "right"
    for column in table.columns[:2]:
        column.no_wrap = True
    for m in report["mixers"]:
        table.add_row(*_cells(m, dict.fromkeys((first, last))))
    console.print(table)
    for m in report["mixers"]:
        for x in m["left_out"]:
            console.print(f"{label(m['name'])} at {x['context']:,} tokens was left out: {x['reason']}", style="dim", highlight=False)
        console.print(
            Text.assemble("\n", (label(m["name"]), "bold"), " continues:\n", (printable(report["prompt"]), "dim"), printable(m["sample"]))
        )


def _cells(mixer: dict, contexts: dict[int, None]) -> list[str]:
    from linattn.compare.text_page import around
    from linattn.reproduce.variants import label

    at = {c["context"]: c for c in mixer["contexts"]}
    t = mixer["training"]
    bits = around(t["validation_bits_per_byte"], t["validation_bits_per_byte_spread"])
    cells = [label(mixer["name"]), bits, figure(t["tokens_per_second"])]
    for key, write in (("prefill_ms", figure), ("decode_ms", figure), ("state_bytes", memory)):
        cells += [write(at[c][key]) if c in at else "-" for c in contexts]
    return cells


def show_task(report: dict, task: Task) -> None:
    """Print a comparison on a task: a table on a terminal; elsewhere tab-separated unrounded figures, each with its spread."""
    from linattn.compare.task_page import cells, heads, reference_cells, seconds

    if not sys.stdout.isatty():
        keys = [key for f in task.figures for key in (f.key, f"{f.key}_spread")]
        print("\t".join(["mixer", "parameters", *keys, "seconds"]))
        for m in report["mixers"]:
            values = [m["name"], m["parameters"], *(m[key] for key in keys), seconds(m)]
            print("\t".join("-" if value is None else str(value) for value in values))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(*heads(task), box=None, header_style="bold", pad_edge=False, collapse_padding=True)
    for column in table.columns[1:]:
        column.justify = "right"
    for m in report["mixers"]:
        table.add_row(m["name"], *cells(m, task))
    for name, figures in report["data"].get("references", {}).items():
        table.add_row(name, *reference_cells(figures, task), style="dim")
    Console().print(table)


def show_rows(columns: Sequence[Column], rows: Sequence[dict[str, Any]]) -> None:
    """Print a table without empty columns on a terminal; elsewhere a line of keys and a line of unrounded figures for each row."""
    if not sys.stdout.isatty():
        keys = [key for c in columns for key in (c.key, *([f"{c.key}_spread"] if c.spread else []))]
        print("\t".join(keys))
        for row in rows:
            print("\t".join("-" if row.get(key) is None else str(row[key]) for key in keys))
        return
    from rich.console import Console
    from rich.table import Column as Head
    from rich.table import Table
    from rich.text import Text

    from linattn.experiment.study import shown
    from linattn.reproduce.variants import label

    full = shown(columns, rows)
    heads = (Head(c.heading, overflow="fold") for c in full)  # otherwise a narrow terminal truncates figures
    table = Table(*heads, box=None, header_style="bold", pad_edge=False, collapse_padding=True)
    for row in rows:
        table.add_row(*(Text(label(row["mixer"]) if c.key == "mixer" else c.cell(row)) for c in full))
    Console().print(table)


def show_cells(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table of texts on a terminal; elsewhere tab-separated lines."""
    if not sys.stdout.isatty():
        print("\n".join("\t".join(line) for line in (heads, *rows)))
        return
    from rich.console import Console
    from rich.table import Column as Head
    from rich.table import Table
    from rich.text import Text

    table = Table(*(Head(head, overflow="fold") for head in heads), box=None, header_style="bold", pad_edge=False, collapse_padding=True)
    for row in rows:
        table.add_row(*map(Text, row))
    Console().print(table)
