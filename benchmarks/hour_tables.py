"""Tables of the first hour: times of the installation and of each page, and the answers to wrong turns."""

from __future__ import annotations

from collections.abc import Iterable

from benchmarks.titles import markdown

PAGES = ("page", "where", "sizes", "steps", "seconds", "longest step", "its seconds", "failures", "warnings")
TURNS = ("mistake", "typed", "answer")


def hour(body: dict, _words: dict) -> str:
    """The machines, a row for each page and one for each wrong turn."""
    steps = body["steps"]
    machines = list(dict.fromkeys(machine(step) for step in steps.values() if "cpu" in step))
    named = {words: chr(ord("A") + i) for i, words in enumerate(machines)}
    pages = [page(name, step, named.get(machine(step), "")) for name, step in steps.items() if name != "turns"]
    turns = [(row["kind"], code(row["typed"]), code(row["said"])) for row in steps["turns"]["rows"]]
    legend = "".join(f"- {letter}: {words}{waiting(steps.values(), words)}.\n" for words, letter in named.items())
    return f"`{body['command']}`:\n\n{legend}\n{markdown(PAGES, pages)}\n{markdown(TURNS, turns)}"


def machine(step: dict) -> str:
    """A machine, its software and the date, in words."""
    if "cpu" not in step:
        return ""
    software = f"Python {step['python']}, torch {step['torch']}, transformers {step['transformers']}"
    return f"{step['cpu']}, {step['threads']} thread{'s' if step['threads'] > 1 else ''}, {software}, {step['date']}"


def waiting(steps: Iterable[dict], words: str) -> str:
    """Load of a machine when its pages were begun, if other programs ran there."""
    loads = [step["load"] for step in steps if "load" in step and machine(step) == words]
    return f"; load average {min(loads):g} to {max(loads):g}, from other programs" if max(loads) > 1 else ""


def page(name: str, step: dict, where: str) -> tuple[str, ...]:
    """Cells of one page, or of the installation."""
    rows = step["rows"]
    longest = max(rows, key=lambda row: row["seconds"])
    failed, warned = sum(row["ended"] != "ran" for row in rows), sum("Warning" in row["said"] for row in rows)
    total = sum(row["seconds"] for row in rows)
    sizes = "small" if step.get("small") else "as shown"
    return (
        name, where, sizes, str(len(rows)), f"{total:.0f}", code(longest["first"]), f"{longest['seconds']:.0f}", str(failed), str(warned)
    )  # fmt: skip


def code(text: str) -> str:
    """``text`` as code in a cell of a table, in double backticks if it has one of its own."""
    mark = "``" if "`" in text else "`"
    return mark + text.replace("|", "\\|").replace("\n", " ") + mark
