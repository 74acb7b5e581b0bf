"""Program that writes the tables of both READMEs and of docs from the measured data: ``python -m benchmarks.tables``.

A table is between ``<!-- from benchmarks/results/FILE.json -->`` and ``<!-- end -->``; without
the file a sentence says so. ``summary of`` in place of ``from`` gives the front page's six rows of a GPU's passes.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from benchmarks import limits
from benchmarks.hour_tables import hour
from benchmarks.peer_tables import decays, patched, portable, revisions
from benchmarks.plots import FRONT
from benchmarks.profile_tables import profiled
from benchmarks.study_tables import causality, compared, losses, reproduced
from benchmarks.titles import TITLES, markdown
from linattn.bench.gpu.cases import DECODE, DECODE_SHAPES, FAMILIES, FIRST, GRAPHED, PASSES, SHAPES, START_SHAPE, STEPS, Case, Shape

ROOT = Path(__file__).parents[1]
MARKED = re.compile(r"(<!-- (?:from|summary of) (benchmarks/results/([a-z]+)-([\w-]+)\.json) -->\n).*?(?=<!-- end -->)", re.S)
BILINGUAL = ("README", "docs/studies", "docs/benchmarks")
PAGES = [*(f"{page}{language}.md" for page in BILINGUAL for language in ("", ".zh")), "docs/first_hour.md"]


def cpu(body: dict, words: dict) -> str:
    """Rows that have a target."""
    return markdown(
        words["ops-cpu"],
        (
            (
                r["what"],
                r["mode"],
                str(r["tokens"]),
                f"{r['ours_ms']:.0f}",
                f"{r['theirs_ms']:.0f}",
                f"{r['ratio']:.2f}",
                f"{r['target']:.2g}",
            )
            for r in body["rows"]
            if r["target"] is not None
        ),
    )


def trained_on_cpu(body: dict, words: dict) -> str:
    """Line for each model and dtype."""
    return markdown(
        words["train-cpu"],
        (
            (
                f"{r['library']} {r['model']}",
                r["dtype"],
                f"{r['tokens_per_second']:,.0f}",
                f"{r['times_llama']:.2f}",
                f"{r['parameters'] / 1e6:.1f}",
            )
            for r in body["rows"]
        ),
    )


# The peer of a family is the first one that was measured, else fla.
PEERS = {"selective_scan": ("mamba-ssm",), "softmax": ("torch",), "gated_delta": ("flash-qla", "fla")}


class Figures:
    """Rows of one card by library and case."""

    def __init__(self, body: dict) -> None:
        key = ("library", "family", "shape", "mode", "decay", "decay_dtype")
        self.rows = {tuple(row[name] for name in key): row for row in body["rows"]}

    def pair(self, case: Case, show: Callable[[dict], str]) -> str:
        """Our figure and a peer's (for softmax only torch's), "" if neither was measured."""
        peers = PEERS.get(case.family, ("fla",))
        peer = next((name for name in peers if (row := self.row(name, case)) and row["ms"] is not None), peers[-1])
        cells = [self.cell(name, case, show) for name in ((peer,) if case.family == "softmax" else ("linattn", peer))]
        return " · ".join(cell or "–" for cell in cells) if any(cells) else ""

    def row(self, library: str, case: Case) -> dict | None:
        return self.rows.get((library, case.family, str(case.shape), case.mode, case.decay, case.decay_dtype))

    def cell(self, library: str, case: Case, show: Callable[[dict], str]) -> str:
        """Result of ``show`` for one row, or its failure, or ""."""
        row = self.row(library, case)
        return "" if row is None else row["failure"] if row["ms"] is None else show(row)


def gpu(body: dict, words: dict) -> str:
    """Passes over whole sequences, then single tokens."""
    figures = Figures(body)
    first, mode, peak, call = words["ops"]
    passes = []
    for family in FAMILIES:
        for name in PASSES:
            cells = [figures.pair(Case.of(family, shape, name), lambda r: f"{r['ms']:.2f}") for shape in SHAPES]
            memory = begun = ""
            if name == PASSES[1]:
                memory = figures.pair(Case.of(family, SHAPES[0], name), lambda r: f"{r['peak_mb']:.0f}")
                begun = figures.cell(
                    "linattn", Case.of(family, START_SHAPE, FIRST), lambda r: f"{r['ms'] / 1e3:.1f} ({r['warm_ms'] / 1e3:.1f})"
                )
            if any(cells):
                passes.append((family, name, *cells, memory, begun))
    steps = []
    for family in STEPS:
        cells = [figures.pair(Case.of(family, shape, DECODE[0]), lambda r: f"{r['ms'] * 1e3:.1f}") for shape in DECODE_SHAPES]
        if any(cells):
            steps.append((family, *cells))
    shapes = [shape for shape in SHAPES if any(any(_row(figures, f, m, (shape,))) for f in FAMILIES for m in GRAPHED)]
    graphed = [(f, m, *_row(figures, f, m, shapes)) for f in FAMILIES for m in GRAPHED if any(_row(figures, f, m, shapes))]
    tables = [markdown((first, mode, *map(str, SHAPES), peak, call), passes)] if passes else []
    tables += [markdown((*words["steps"], *(f"B{s.B} H{s.H} D{s.D}" for s in DECODE_SHAPES)), steps)] if steps else []
    tables += [markdown((*words["graphed"], *map(str, shapes)), graphed)] if graphed else []
    limited = [row for family in limits.MOVED for row in _limits(figures, family)]
    tables += [markdown((words["limits"][0].format(shape=limits.SHAPE), *words["limits"][1:]), limited)] if limited else []
    return f"{_measured(body, words)}\n\n" + "\n".join(tables)


def _limits(figures: Figures, family: str) -> Iterator[tuple[str, ...]]:
    """Measured milliseconds of each pass, in a graph if there is such a figure, beside the memory-bandwidth bound."""
    for mode, graph, (own, least) in zip(PASSES, GRAPHED, limits.rows(family), strict=True):
        found = [figures.row("linattn", Case.of(family, limits.SHAPE, name)) for name in (graph, mode)]
        times = [row["ms"] for row in found if row is not None and row["ms"] is not None]
        if times:
            yield family, mode, f"{min(times):.2f}", f"{own:.2f}", f"{100 * own / min(times):.0f} %", f"{least:.2f}"


def _row(figures: Figures, family: str, mode: str, shapes: Iterable[Shape]) -> list[str]:
    """Microseconds of ``shapes``."""
    return [figures.pair(Case.of(family, shape, mode), lambda r: f"{r['ms'] * 1e3:.0f}") for shape in shapes]


def _measured(body: dict, words: dict) -> str:
    last = body["runs"][-1]
    versions = {row["library"]: row["version"] for row in body["rows"]}
    fla, mamba, qla = (versions.get(name, "–") for name in ("fla", "mamba-ssm", "flash-qla"))
    dates = sorted({body["runs"][row["run"]]["date"] for row in body["rows"]})
    date = " – ".join(dict.fromkeys((dates[0], dates[-1])))
    return words["measured"].format(card=body["card"], torch=last["torch"], triton=last["triton"], fla=fla, mamba=mamba, qla=qla, date=date)


def train(body: dict, words: dict) -> str:
    """Line for each model, with torch.compile's figure beside it."""
    models: dict[tuple[str, str], dict[bool, dict]] = {}
    for row in body["rows"]:
        models.setdefault((row["library"], row["model"]), {})[row["compiled"]] = row
    return markdown(words["train"], (_trained(" ".join(name), both) for name, both in models.items()))


def _trained(name: str, both: dict[bool, dict]) -> tuple[str, ...]:
    def speed(row: dict | None) -> str:
        if row is None:
            return "–"
        return row["failure"] if row["tokens_per_second"] is None else f"{row['tokens_per_second']:,.0f}"

    eager, compiled = both.get(False), both.get(True)
    done = next((row for row in (eager, compiled) if row and row["tokens_per_second"] is not None), None)
    rest = (f"{done['first_step_s']:.0f}", f"{done['peak_gb']:.1f}", f"{done['parameters'] / 1e6:.0f}") if done else ("–",) * 3
    return (name, speed(eager), speed(compiled), *rest)


def vision(body: dict, words: dict) -> str:
    """Line for each mixer and pass, a column for each grid of tokens."""
    sides = sorted({row["side"] for row in body["rows"]})
    lines: dict[tuple[str, str], dict[int, dict]] = {}
    for row in body["rows"]:
        lines.setdefault((row["mode"], row["mixer"]), {})[row["side"]] = row
    cells = (
        (mixer, mode, *(f"{found[n]['tokens_per_second'] / 1e3:,.0f}" if n in found else "" for n in sides))
        for (mode, mixer), found in lines.items()
    )
    return markdown((*words["vision"], *(f"{n}×{n}" for n in sides)), cells)


def parallel(body: dict, words: dict) -> str:
    """Line for each recurrence and length of a sequence on several cards."""
    cells = []
    for r in sorted(body["rows"], key=lambda r: (r["library"] != "linattn", r["graph"])):
        name = f"{r['library']}, {FRONT.get(r['family'], r['family'])}" + f", {words['in a graph']}" * r["graph"]
        cells.append((name, f"{r['tokens']:,}", f"{r['one_ms']:.2f}", f"{r['all_ms']:.2f}", f"{r['efficiency']:.0%}", f"{r['memory']:.2f}"))
    return markdown((words["parallel"][0].format(**body["rows"][0]), *words["parallel"][1:]), cells)


def sharded(body: dict, words: dict) -> str:
    """Line for each training of a model with sharded parameters."""
    cells = []
    for r in body["rows"]:
        figures = (f"{r['context']:,}", f"{r['tokens_per_second']:,.0f}", f"{r['peak_gb']:.0f}")
        cells.append((f"{r['model']} {r['mixer']}", str(r["cards"]), str(r["cp"]), str(r["batch"]), *figures))
    return markdown(words["sharded"], cells)


def decode(body: dict, words: dict) -> str:
    """Line for each model, number of rows and length of the text read before."""
    cells = []
    for r in body["rows"]:
        if r.get("what") == "times" and r["library"] == "linattn":
            name, step, floor = f"{r['model']} {r['size']}", f"{r['step_ms']:.3f}", f"{r['floor_ms']:.3f} ({r['of_floor']:.0%})"
            cells.append((name, str(r["rows"]), f"{r['context']:,}", step, floor, f"{r['generate_ms']:.3f}"))
    return markdown(words["decode"], cells)


def decode_on_cpu(body: dict, words: dict) -> str:
    """Line for each model, dtype and length of the text read before; others are measured only through ``generate``."""
    cells = []
    for r in body["rows"]:
        if r["what"] == "times":
            own = (f"{r['step_ms']:.1f}", f"{r['floor_ms']:.1f} ({r['of_floor']:.0%})") if "step_ms" in r else ("", "")
            cells.append((f"{r['library']} {r['model']}", r["dtype"], f"{r['context']:,}", *own, f"{r['generate_ms']:.1f}"))
    return markdown((*words["decode-cpu"], *words["decode"][2:]), cells)


def runs(body: dict, words: dict) -> str:
    """Line for each run: machine, versions and command."""
    told = ({**run, "card": run["cpu"] if run["card"] == "cpu" else run["card"]} for run in body["runs"])
    return "\n".join(words["run"].format(**run) for run in told) + "\n\n"


def quantised(body: dict, words: dict) -> str:
    """Line for each model and format, and for each pair with llama.cpp."""
    steps = [
        (
            f"{r['model']} {r['size']}",
            r["to"] if r["group"] is None else f"{r['to']}, {r['group']}, {words['head']} {r['head']}",
            f"{r['step_ms']:.3g}",
            f"{r['ratio']:.2f}",
            f"{r['bound']:.2f}" if "bound" in r else "",
            f"{r['weights_bytes'] / 1e6:,.0f}",
            f"{r['of_bandwidth']:.0%}",
        )
        for r in body["rows"]
        if r["what"] == "step"
    ]
    beside = [
        (f"{r['model']} {r['size']}", r["to"], f"{r['step_ms']:.3g}", r["gguf"], f"{r['theirs_ms']:.3g}", f"{r['ratio']:.2f}")
        for r in body["rows"]
        if r["what"] == "llama.cpp"
    ]
    text = runs(body, words) + (markdown(words["quantised"], steps) if steps else "")
    return text + ("\n" if steps and beside else "") + (markdown(words["llama.cpp"], beside) if beside else "")


def speculated(body: dict, words: dict) -> str:
    """Line for each model, batch and text, and for each mixer of random patterns."""
    speeds = [
        (
            f"{r['mixer']} {r['size']}, {r['dtype']}",
            str(r["rows"]),
            r["text"],
            f"{r['speedup']:.2f}",
            f"{r['least']:.2f}",
            f"{r['accepted']:,} / {r['drafted']:,}",
        )
        for r in body["rows"]
        if r["what"] == "speed"
    ]
    drawn = [
        (r["mixer"], f"{r['patterns']:,}", f"{r['error']:.1e}", "no" if r["bits"] else "yes")
        for r in body["rows"]
        if r["what"] == "patterns"
    ]
    text = runs(body, words) + (markdown(words["speculate"], speeds) if speeds else "")
    return text + ("\n" if speeds and drawn else "") + (markdown(words["patterns"], drawn) if drawn else "")


def quality(body: dict, words: dict) -> str:
    """Line for each model: bits per byte, and how much more than in bfloat16."""
    found: dict[str, dict[tuple[str, bool], str]] = {}
    for r in body["rows"]:
        more = "" if r["to"] == "bfloat16" else f" ({r['more']:+.2%})"
        own = found.setdefault(f"{r['model']}, {r['parameters'] / 1e6:,.1f} M", {})
        own[r["to"], r["calibrated"]] = f"{r['bits_per_byte']:.4f}{more}"
    columns = ("bfloat16", False), ("int8", False), ("int4", False), ("int4", True)
    rows = ((name, *(own.get(column, "") for column in columns)) for name, own in found.items())
    return runs(body, words) + markdown(words["quality"], rows)


def compilers(body: dict, words: dict) -> str:
    """Line for each model and dtype, a column for each way to compile its step."""
    ways = list(dict.fromkeys(row["way"] for row in body["rows"]))
    lines: dict[tuple[str, ...], dict[str, dict]] = {}
    for row in body["rows"]:
        lines.setdefault((f"{row['model']} {row['size']}", row["dtype"]), {})[row["way"]] = row
    shown = {name: [f"{row[way]['step_ms']:.3g}" if "step_ms" in row.get(way, {}) else "–" for way in ways] for name, row in lines.items()}
    return markdown((*words["compilers"], *ways), ((*name, *cells) for name, cells in shown.items()))


def trainer(body: dict, words: dict) -> str:
    """Line for each model: tokens per second of ``linattn bench train`` and of ``linattn train``, and their ratio."""
    found: dict[str, dict[bool, dict]] = {}
    for row in body["rows"]:
        found.setdefault(row["model"], {})[row["program"].startswith("linattn train")] = row
    lines = []
    for name, both in found.items():
        bench, train = (both[own]["tokens_per_second"] for own in (False, True))
        lines.append((name, f"{bench:,.0f}", f"{train:,.0f}", f"{train / bench:.1%}"))
    return markdown(words["trainer"], lines)


def kernels(body: dict, words: dict) -> str:
    """Line for each recurrence and shape: the sum of its kernels with each backward pass, one figure a turn."""
    found: dict[tuple[str, str], dict[str, list[str]]] = {}
    for row in body["rows"]:
        told = found.setdefault((row["family"], row["shape"]), {})
        told.setdefault(body["runs"][row["run"]]["backward"], []).append(f"{row['us']:,.0f}")
    ways = ("two kernels", "one kernel")
    return markdown(words["kernels"], ((*case, *(" · ".join(told[way]) for way in ways)) for case, told in found.items()))


def table(file: str, suite: str, card: str, words: dict) -> str:
    """Table of the results in ``file``."""
    path = ROOT / file
    if not path.is_file():
        return words["absent"].format(file=path.name) + "\n"
    body = json.loads(path.read_text(encoding="utf-8"))
    suites = {
        "train": train,
        "compare": compared,
        "reproduce": reproduced,
        "vision": vision,
        "decode": decode,
        "front": summary,
        "losses": losses,
        "causality": causality,
        "parallel": parallel,
        "patch": patched,
        "portable": portable,
        "revisions": revisions,
        "decays": decays,
        "sharded": sharded,
        "quantised": quantised,
        "speculate": speculated,
        "quality": quality,
        "compilers": compilers,
        "kernels": kernels,
        "trainer": trainer,
        "profile": profiled,
        "first": hour,
    }
    on_cpu = {"train": trained_on_cpu, "ops": cpu, "decode": decode_on_cpu}
    make = (suites | on_cpu if card == "cpu" else suites).get(suite, gpu)
    text = make(body, words)
    for value, told in words.get("values", {}).items():  # of cells; no title has them
        text = text.replace(value, told)
    return text


def summary(body: dict, words: dict) -> str:
    """Row of the front page for each family: our time and that of the fastest other library, forward and with gradients."""
    figures = Figures(body)
    others = sorted({row["library"] for row in body["rows"]} - {"linattn"})
    lines = []
    for family, name in FRONT.items():
        cells = []
        for mode in PASSES:
            case = Case.of(family, SHAPES[0], mode)
            ours, *theirs = [(figures.row(library, case) or {}).get("ms") for library in ("linattn", *others)]
            best, library = min((ms, library) for ms, library in zip(theirs, others, strict=True) if ms is not None)
            cells += [f"{ours:.2f}", f"{best:.2f} ({library})", f"{best / ours:.1f}"]
        lines.append((name, *cells))
    return f"{_measured(body, words)}\n\n{markdown(words['front'], lines)}"


def filled(name: str) -> str:
    """Text of the page ``name`` with its tables renewed."""
    text, titles = (ROOT / name).read_text(encoding="utf-8"), TITLES["zh" if name.endswith(".zh.md") else "en"]
    return MARKED.sub(lambda found: found[1] + table(found[2], "front" if "<!-- summary" in found[1] else found[3], found[4], titles), text)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    for name in PAGES:
        (ROOT / name).write_text(filled(name), encoding="utf-8")
