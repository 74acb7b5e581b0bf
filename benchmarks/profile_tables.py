"""Tables of :mod:`benchmarks.profile`: a line for each kind of kernel, a column for each model, training and decoding apart."""

from __future__ import annotations

from benchmarks.titles import markdown


def profiled(body: dict, words: dict) -> str:
    """Milliseconds of each kind with its bound, then the whole step, the sum of bounds, and what those allow."""
    titles, kinds = words["profile"], words["kinds"]
    wholes = [row for row in body["rows"] if row["kind"] == "step"]
    rates = f"{wholes[-1]['peak_flops'] / 1e12:.0f} TFLOP/s, {wholes[-1]['bandwidth'] / 1e12:.2f} TB/s"
    parts = [titles["measured"].format(card=body["card"], torch=body["runs"][-1]["torch"], rates=rates) + "\n"]
    for decoding in (False, True):
        steps = [row for row in wholes if (row["what"] == "decoding") == decoding]
        if steps:
            parts.append(_table(body, steps, (titles["decoding" if decoding else "training"], titles["rows"]), kinds))
    return "\n".join(parts)


def _table(body: dict, steps: list[dict], titles: tuple[str, str], kinds: dict) -> str:
    digits = 3 if steps[0]["what"] == "decoding" else 1
    found = [{row["kind"]: row for row in body["rows"] if _same(row, step)} for step in steps]
    columns = [titles[1].format(**step) if digits == 3 else step["model"] for step in steps]
    names = [kind for kind in kinds if any(kind in rows for rows in found) and kind not in ("step", "bounds", "tokens")]
    lines = [(kinds[kind], *(_cell(rows.get(kind), digits) for rows in found)) for kind in names]
    lines.append((kinds["step"], *(f"{step['ms']:.{digits}f}" for step in steps)))
    bounds = [sum(row.get("bound_ms") or 0 for row in rows.values()) for rows in found]
    lines.append((kinds["bounds"], *(f"{bound:.{digits}f} ({bound / step['ms']:.0%})" for bound, step in zip(bounds, steps, strict=True))))
    tokens = [step.get("tokens", step["rows"]) for step in steps]
    speeds = [
        f"{count / step['ms']:.{digits // 2}f} ({count / bound:.{digits // 2}f})"
        for count, step, bound in zip(tokens, steps, bounds, strict=True)
    ]
    return markdown((titles[0], *columns), [*lines, (kinds["tokens"], *speeds)])


def _same(row: dict, step: dict) -> bool:
    return all(row[name] == step[name] for name in ("what", "model", "rows"))


def _cell(row: dict | None, digits: int) -> str:
    if row is None:
        return ""
    bound = row.get("bound_ms")
    return f"{row['ms']:.{digits}f}" + (f" ({bound:.{digits}f})" if bound else "")
