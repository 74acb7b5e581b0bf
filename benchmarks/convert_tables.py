"""Write the tables of docs/convert.rst and docs/serving.rst from results: ``python -m benchmarks.convert_tables``.

They are between ``.. from benchmarks/results/FILE.json`` and ``.. end``; without the file there are none.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from linattn.report.words import figure, memory, tokens

PAGE = Path(__file__).parents[1] / "docs" / "convert.rst"
SERVING = PAGE.parent / "serving.rst"
MARKED = re.compile(r"(\.\. from (benchmarks/results/[\w-]+\.json)\n).*?(?=^\.\. end$)", re.S | re.M)
KINDS = ("pure", "uniform", "chosen")
LONGER = ", longer"  # suffix of students with more tokens in the second stage
MORE = ", more text"  # suffix of rows of a run with more text to draw from
PLAIN = ", not calibrated"  # suffix of first stages without calibration
Row = dict[str, Any]


def list_table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Render a table of reStructuredText."""
    lines = [".. list-table::", "   :header-rows: 1", ""]
    for row in [list(heads), *map(list, rows)]:
        lines += [f"   {'* -' if i == 0 else '  -'} {cell or '–'}" for i, cell in enumerate(row)]
    return "\n".join(lines) + "\n"


def _by_name(body: dict[str, Any]) -> dict[str, Row]:
    return {row["name"]: row for row in body["rows"]}


def joined(bodies: list[dict[str, Any]]) -> dict[str, Any]:
    """Rows of several cards as one: earlier cards take precedence; a comparison keeps the row of its own card."""
    rows: dict[str, Row] = {}
    for body in bodies:
        own = _by_name(body)
        for name, row in own.items():
            beside = {"calibrated": own[name.removesuffix(PLAIN)]} if name.endswith(PLAIN) else {}
            rows.setdefault(name, row | beside)
    return {"rows": list(rows.values())}


def _needles(row: Row) -> dict[int, float]:
    return {task["length"]: task["right"] for task in row["evaluation"]["tasks"]}


def students(body: dict[str, Any]) -> str:
    """Line for the teacher and for each student of the first seed."""
    rows = _by_name(body)
    if not any(name.endswith(KINDS) and "evaluation" in row for name, row in rows.items()):
        return ""
    teacher = rows["teacher"]
    lengths = list(_needles(teacher))
    heads = ["student", "softmax layers", "tokens, stages 1 and 2", "bits per byte", "over the teacher", "KL", "top-1"]
    heads += [f"needle {tokens(n)}" for n in lengths]
    cells = [_line("teacher", teacher, teacher, rows, "teacher")]
    for kind in KINDS:
        for name, row in rows.items():
            mixer, _, which = name.partition(" ")
            if which in (kind, kind + LONGER, kind + MORE) and "evaluation" in row:
                cells.append(_line(f"{mixer}, {which}", row, teacher, rows, _first(name)))
    return list_table(heads, cells)


def _line(title: str, row: Row, teacher: Row, rows: dict[str, Row], first: str) -> list[str]:
    found, best = row["evaluation"], teacher["evaluation"]["bits_per_byte"]
    if row is teacher:
        line = [title, "all", "", f"{best:.3f}", "", "", ""]
    else:
        spent = [rows[first]["options"]["tokens1"], row["options"]["tokens2"]]
        over = 100 * (found["bits_per_byte"] / best - 1)
        line = [title, ", ".join(map(str, row["kept"])) or "none", " + ".join(f"{n / 1e6:g}M" for n in spent)]
        line += [f"{found['bits_per_byte']:.3f}", f"{over:.1f} %", f"{found['kl']:.3f}", f"{100 * found['top1']:.1f} %"]
    return line + [f"{100 * right:.0f} %" for right in _needles(row).values()]


def decoding(body: dict[str, Any]) -> str:
    """Bytes of state and decoding speed, which depend only on the mixers."""
    rows = _by_name(body)
    names = list(dict.fromkeys(name.partition(", ")[2] for name in rows if name.startswith("decode ")))
    devices = [device for device in ("cuda", "cpu") if any(name.startswith(f"decode {device}, ") for name in rows)]
    heads, cells = ["student"], [[name] for name in names]
    for device in devices:
        measured = {
            name: {one["length"]: one for one in rows.get(f"decode {device}, {name}", {"decoding": []})["decoding"]} for name in names
        }
        title = {"cuda": "GPU", "cpu": "CPU"}[device]
        for length in sorted({length for found in measured.values() for length in found}):
            heads += [f"state at {tokens(length)}"] * (device == devices[0]) + [f"tokens/s on the {title} at {tokens(length)}"]
            for line, name in zip(cells, names, strict=True):
                one = measured[name].get(length)
                line += [memory(one["state_bytes"]) if one else ""] * (device == devices[0]) + [figure(one["tokens_per_s"]) if one else ""]
    return list_table(heads, cells) if names else ""


def needles(body: dict[str, Any]) -> str:
    """Needles that the teacher finds."""
    found = [f"{100 * right:.0f} % at {tokens(length)}" for length, right in _needles(_by_name(body)["teacher"]).items()]
    return f"Needles that the teacher finds: {', '.join(found)}.\n"


def first_stage(body: dict[str, Any]) -> str:
    """Line for each mixer: the student as copied, calibrated, and after the first stage."""
    cells = []
    for name, row in _by_name(body).items():
        if name.partition(" ")[2] in ("stage 1", "stage 1" + MORE):
            begun = {str(record["stage"]): record for record in row["history"] if record["tokens"] == 0}
            last, best = row["history"][-1], row["teacher_bits_per_byte"]
            kls = [f"{begun[stage]['kl']:.2f}" if stage in begun else "" for stage in ("copy", "calibrate")]
            over = f"{100 * (last['bits_per_byte'] / best - 1):.1f} %"
            cells.append([name.replace(" stage 1", ""), f"{last['tokens']:,}", *kls, *_figures(last), over, f"{row['seconds']:.0f}"])
    heads = (
        "mixer of every layer",
        "tokens",
        "KL, copied",
        "KL, calibrated",
        "KL",
        "top-1",
        "bits per byte",
        "over the teacher",
        "seconds",
    )
    return list_table(heads, cells) if cells else ""


def cut_off(body: dict[str, Any]) -> str:
    """Second stages that the time limit ended, at their last validation."""
    cells = []
    for name, row in _by_name(body).items():
        if name.endswith(", cut off"):
            last = row["history"][-1]
            over = f"{100 * (last['bits_per_byte'] / row['teacher_bits_per_byte'] - 1):.1f} %"
            cells.append([name.removesuffix(", cut off"), f"{last['tokens']:,}", *_figures(last), over])
    return list_table(("student", "tokens of stage 2", "KL", "top-1", "bits per byte", "over the teacher"), cells) if cells else ""


def rates(body: dict[str, Any]) -> str:
    """Learning rates tried for the second stage."""
    tried = [row for name, row in _by_name(body).items() if ", rate " in name]
    return _last(tried, "learning rate of stage 2", lambda row: f"{row['options']['rate2']:g}")


def _last(rows: list[Row], head: str, title: Any) -> str:
    cells = [(title(row), f"{row['options']['tokens2']:,}", *_figures(row["history"][-1])) for row in rows]
    return list_table((head, "tokens", "KL", "top-1", "bits per byte"), cells) if rows else ""


def _figures(record: Row) -> tuple[str, str, str]:
    return f"{record['kl']:.3f}", f"{100 * record['top1']:.1f} %", f"{record['bits_per_byte']:.3f}"


def calibration(body: dict[str, Any]) -> str:
    """KL along the first stage, with calibration and without."""
    cells = []
    for name, row in _by_name(body).items():
        if name.endswith(PLAIN):
            for title, one in (("calibrated", row["calibrated"]), ("not calibrated", row)):
                cells += [(title, str(r["stage"]), f"{r['tokens']:,}", f"{r['kl']:.3f}") for r in one["history"]]
    return list_table(("first stage", "stage", "tokens", "KL"), cells) if cells else ""


def without_first(body: dict[str, Any]) -> str:
    """Line for a student with both stages and for one with all of the tokens in the second."""
    rows, cells = _by_name(body), []
    for name, row in rows.items():
        if name.endswith(", no stage 1"):
            both = rows[name.removesuffix(", no stage 1")]
            first = rows[f"{name.partition(' ')[0]} stage 1"]["options"]["tokens1"]
            for title, one, before in (("both stages", both, first), ("stage 2 alone", row, 0)):
                cells.append((title, f"{before + one['options']['tokens2']:,}", *_figures(one["history"][-1])))
    return list_table(("student", "tokens", "KL", "top-1", "bits per byte"), cells) if cells else ""


def _mean_needle(row: Row) -> float:
    return statistics.mean(_needles(row).values())


def _mixers_with_seeds(rows: dict[str, Row]) -> list[str]:
    return list(dict.fromkeys(name.partition(" ")[0] for name in rows if ", seed " in name and not name.endswith(MORE)))


def _seeds(rows: dict[str, Row], mixer: str) -> list[str]:
    """Ends of the names of the seeds for which both kinds of hybrids were measured."""
    return [n for n in ("", ", seed 1", ", seed 2") if all(f"{mixer} {kind}{n}" in rows for kind in ("uniform", "chosen"))]


def seeds(body: dict[str, Any]) -> str:
    """Needles and KL of uniform and chosen layers over seeds."""
    rows, cells = _by_name(body), []
    for mixer in _mixers_with_seeds(rows):
        for kind in ("uniform", "chosen"):
            found = [rows[name] for n in ("", ", seed 1", ", seed 2") if (name := f"{mixer} {kind}{n}") in rows]
            if found:
                cells.append([f"{mixer}, {kind}", str(len(found)), " · ".join(f"{row['evaluation']['kl']:.3f}" for row in found),
                              " · ".join(f"{100 * _mean_needle(row):.1f} %" for row in found)])  # fmt: skip
    return list_table(("student", "seeds", "KL", "needles, mean over lengths"), cells) if cells else ""


def _is_student(name: str) -> bool:
    return name.removesuffix(MORE).removesuffix(LONGER).endswith(KINDS)


def _reached(row: Row) -> tuple[str, str]:
    """Sentence on when calibration reaches the final KL of the first stage without it, and whether within a third of the tokens."""
    last = row["history"][-1]
    late = min((r["tokens"] for r in row["calibrated"]["history"] if r["kl"] <= last["kl"]), default=None)
    when = "later" if late is None else f"at {100 * late / last['tokens']:.0f} % of them"
    met = late is not None and 3 * late <= last["tokens"]
    return ("yes" if met else "no"), f"{row['name'].partition(' ')[0]}: {when}"


def aims(body: dict[str, Any]) -> str:
    """The aim, the number of students that reach it, and the best."""
    rows = _by_name(body)
    best = rows["teacher"]["evaluation"]["bits_per_byte"]
    given = [(name, row) for name, row in rows.items() if "evaluation" in row and _is_student(name)]
    hybrid, pure = [x for x in given if x[1]["kept"]], [x for x in given if not x[1]["kept"]]

    def over(row: Row) -> float:
        return 100 * (float(row["evaluation"]["bits_per_byte"]) / best - 1)

    cells = []
    for kind, found, most in (("a hybrid", hybrid, 3), ("a pure student", pure, 8)):
        if found:
            name, row = min(found, key=lambda x: over(x[1]))
            reach = f"{sum(over(row) <= most for _, row in found)} of {len(found)}"
            cells.append((f"{kind} at most {most} % more bits per byte than the teacher", reach, f"{over(row):.1f} % ({name})"))
    if hybrid:
        name, row = max(hybrid, key=lambda x: x[1]["evaluation"]["top1"])
        reach = f"{sum(row['evaluation']['top1'] >= 0.9 for _, row in hybrid)} of {len(hybrid)}"
        cells.append(("a hybrid with 90 % top-1 agreement", reach, f"{100 * row['evaluation']['top1']:.1f} % ({name})"))
    for mixer in _mixers_with_seeds(rows):
        pairs = [(_mean_needle(rows[f"{mixer} chosen{n}"]), _mean_needle(rows[f"{mixer} uniform{n}"])) for n in _seeds(rows, mixer)]
        if pairs:
            gains = " · ".join(f"{100 * (chosen - uniform):+.1f}" for chosen, uniform in pairs)
            reach = f"{sum(chosen > uniform for chosen, uniform in pairs)} of {len(pairs)} seeds"
            cells.append((f"more needles with chosen than with uniform layers, {mixer}", reach, f"{gains} percentage points"))
    if given:
        compared = [_reached(row) for name, row in rows.items() if name.endswith(PLAIN)]
        cells += [("with calibration the same KL in a third of the tokens", *said) for said in compared]
        if not compared:
            cells.append(("with calibration the same KL in a third of the tokens", "not measured", ""))
        slowest, name = max((row["seconds"] + rows[_first(name)]["seconds"], name) for name, row in given)
        cells.append(("at most 30 minutes a student", f"{len(given)} of {len(given)}" if slowest <= 1800 else "not all",
                      f"at most {slowest / 60:.1f} minutes beside others on the card ({name})"))  # fmt: skip
    return list_table(("aim", "reached by", "best, or by seed"), cells) if cells else ""


def _first(name: str) -> str:
    """Name of the first stage of the student ``name``."""
    return f"{name.partition(' ')[0]} stage 1{MORE if name.endswith(MORE) else ''}"


def second_half(body: dict[str, Any]) -> str:
    """Decrease of the KL in the second half of the second stage."""
    falls = []
    for name, row in _by_name(body).items():
        if "evaluation" in row and _is_student(name):
            validated = [record["kl"] for record in row["history"] if record["stage"] == 2]
            if len(validated) == 2:
                falls.append(100 * (1 - validated[1] / validated[0]))
    return f"In the second half of the second stage the KL falls by {min(falls):.0f} to {max(falls):.0f} %.\n" if falls else ""


def pool(body: dict[str, Any]) -> str:
    """Line for each pool of rows that join and leave, with its way of writing states."""
    heads = ("mixer", "states written", "tokens/s", "of the fixed batch", "p50 between two", "p99", "p50 at 80 %", "p99 at 80 %")
    cells = []
    for row in sorted(body["rows"], key=lambda row: (row["defer"], row["mixer"])):
        times = [f"{row[name]:.1f} ms" for name in ("p50_ms", "p99_ms", "loaded_p50_ms", "loaded_p99_ms")]
        how = "deferred" if row["defer"] else "every step"
        cells.append((row["mixer"], how, f"{row['tokens_per_s'] / 1e3:.1f}k", f"{row['share']:.0%}", *times))
    return list_table(heads, cells)


def stages(body: dict[str, Any]) -> str:
    """KL after equal steps with the first stage and without it."""
    cells = []
    for row in sorted(body["rows"], key=lambda row: (row["steps"], row["rate2"])):
        both, alone = ({str(record["stage"]): record["kl"] for record in row[name]} for name in ("both", "second alone"))
        cells.append(
            (str(row["steps"]), f"{row['rate2']:g}", *(figure(kl) for kl in (alone["2"], both["calibrate"], both["1"], both["2"])))
        )
    heads = ("steps", "rate of stage 2", "stage 2 alone", "calibrated", "after stage 1", "after stage 2")
    run = body["run"]
    return f"``{run['command']}``, {run['cpu']}, torch {run['torch']}, {run['date']}:\n\n{list_table(heads, cells)}"


def thirds(body: dict[str, Any]) -> str:
    """KL after the first stage with calibration in a third of the steps and without it, one figure a seed."""
    cells = []
    for mixer, steps in dict.fromkeys((row["mixer"], row["steps"]) for row in body["rows"]):
        rows = [row for row in body["rows"] if (row["mixer"], row["steps"]) == (mixer, steps)]
        shown = [" · ".join(f"{row[name][-1]['kl']:.4f}" for row in rows) for name in ("calibrated", "not calibrated")]
        cells.append((mixer, str(steps), shown[1], str(steps // 3), shown[0]))
    run = body["run"]
    heads = ("student", "steps", "not calibrated", "steps", "calibrated")
    return f"``{run['command']}``, {run['cpu']}, torch {run['torch']}, {run['date']}:\n\n{list_table(heads, cells)}"


def text(path: str) -> str:
    """Tables of one file of results; empty if there is none."""
    file = PAGE.parents[1] / path
    if not file.exists():
        return "\n"
    body = json.loads(file.read_text(encoding="utf-8"))
    if body["schema"] == "linattn.stages":
        return "\n" + stages(body) + "\n"
    if body["schema"] == "linattn.calibration":
        return "\n" + thirds(body) + "\n"
    if body["schema"] == "linattn.bench.gpu":
        return "\n" + pool(body) + "\n"
    others = [json.loads(f.read_text(encoding="utf-8")) for f in sorted(file.parent.glob("convert-*.json")) if f != file]
    return _conversions([body, *(other for other in others if other["schema"] == body["schema"])])


def _conversions(bodies: list[dict[str, Any]]) -> str:
    """Tables of the students of all cards, and of each card's decoding."""
    body, cards = joined(bodies), " and ".join(one["card"] for one in bodies)
    run = next(row["run"] for row in body["rows"] if "history" in row)
    facts = f"{cards}, torch {run['torch']}, {run.get('date', '')}".rstrip(", ")
    parts = [f"Measured on {facts} (``{run['command']}``, and the commands that stand in the rows).\n", needles(body)]
    parts += ["Aims:\n", aims(body), second_half(body)] if aims(body) else []
    if not students(body):
        parts.append("No second stage has come to its end yet: needles of students, layers chosen by KL and seeds were not measured.\n")
    for title, part in (
        ("Students:", students(body)),
        *((f"Decoding one sequence, {one['card']} (bfloat16; float32 in four threads of a busy CPU):", decoding(one)) for one in bodies),
        ("After the first stage, on the conversion's validation text; seconds beside others on the card:", first_stage(body)),
        ("Second stages that the time limit ended, seven layers softmax, at their last validation:", cut_off(body)),
        ("Learning rates of the second stage:", rates(body)), ("The first stage with and without calibration:", calibration(body)),
        ("A hybrid, uniform, with the first stage and without it:", without_first(body)),
        ("Uniform and chosen layers:", seeds(body)),
    ):  # fmt: skip
        parts += [title + "\n", part] if part else []
    return "\n" + "\n".join(parts) + "\n"


def filled(page: Path | None = None) -> str:
    """The page, that of conversions by default, with its tables."""
    return MARKED.sub(lambda found: found[1] + text(found[2]), (PAGE if page is None else page).read_text(encoding="utf-8"))


if __name__ == "__main__":
    for page in (PAGE, SERVING):
        page.write_text(filled(page), encoding="utf-8")
