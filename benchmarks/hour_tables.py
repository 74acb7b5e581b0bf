"""Tables of the first hour: times of the installation and of each page, and the answers to wrong turns."""

from __future__ import annotations

from benchmarks.titles import markdown

PAGES = ("page", "where", "sizes", "load", "steps", "seconds", "processor seconds", "longest step", "its seconds", "failures", "warnings")
TURNS = ("mistake", "typed", "answer")


def hour(body: dict, _words: dict) -> str:
    """The machines, a row for each page and one for each wrong turn."""
    steps = body["steps"]
    machines = list(dict.fromkeys(machine(step) for step in steps.values() if "cpu" in step))
    named = {words: chr(ord("A") + i) for i, words in enumerate(machines)}
    pages = [page(name, step, named.get(machine(step), "")) for name, step in steps.items() if name != "turns"]
    turns = [(row["kind"], code(row["typed"]), code(row["said"])) for row in steps["turns"]["rows"]]
    legend = "".join(f"- {letter}: {words}.\n" for words, letter in named.items())
    return f"`{body['command']}`:\n\n{legend}\n{markdown(PAGES, pages)}\n{markdown(TURNS, turns)}"


def machine(step: dict) -> str:
    """A machine, its distribution and software, in words; empty for an installation, whose record has no processor."""
    if "cpu" not in step:
        return ""
    system = f"{step['distribution']}, {step['compiler'] or 'no C++ compiler'}"
    software = f"Python {step['python']}, torch {step['torch']}, transformers {step['transformers']}"
    return f"{step['cpu']}, {step['threads']} thread{'s' if step['threads'] > 1 else ''}, {system}, {software}, {step['date']}"


def page(name: str, step: dict, where: str) -> tuple[str, ...]:
    """Cells of one page, or of the installation."""
    rows = step["rows"]
    longest = max(rows, key=lambda row: row["seconds"])
    failed, warned = sum(row["ended"] != "ran" for row in rows), sum("Warning" in row["said"] for row in rows)
    total = sum(row["seconds"] for row in rows)
    sizes = "small" if step.get("small") else "as shown"
    return (
        name, where, sizes, f"{step['load']:g}", str(len(rows)), f"{total:.0f}", str(step["processor_seconds"]),
        code(longest["first"]), f"{longest['seconds']:.0f}", str(failed), str(warned),
    )  # fmt: skip


def code(text: str) -> str:
    """``text`` as code in a cell of a table, in double backticks if it has one of its own."""
    mark = "``" if "`" in text else "`"
    return mark + text.replace("|", "\\|").replace("\n", " ") + mark
