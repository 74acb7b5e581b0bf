"""Results of a report for one system, for pages by system such as the atlas."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from linattn.reproduce import variants
from linattn.reproduce.ledger import load
from linattn.reproduce.options import STUDIES


def of(report: Mapping[str, Any], system: str) -> tuple[list[str], list[list[str]]]:
    """The formatted rows of ``report``, the content of report.json, whose mixer is ``system`` with any options.

    Returns:
        Headings and rows of the table, without the columns that are empty in all of these rows; two empty lists where there is no row.

    Raises:
        ValueError: for a report of no study.
    """
    if report.get("study") not in STUDIES:
        raise ValueError(f"the report must be of one of {', '.join(STUDIES)}, but says {report.get('study')!r}")
    columns = load(report["study"]).all_columns
    rows = [row for row in report["rows"] if str(row.get("mixer", "")).partition(":")[0] == system]
    shown = [c for c in columns if any(row.get(c.key) is not None for row in rows)]
    return [c.heading for c in shown], [[variants.label(row["mixer"]) if c.key == "mixer" else c.cell(row) for c in shown] for row in rows]
