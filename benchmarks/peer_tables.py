"""Tables beside other libraries: models of fla under patch_fla, the portable kernels beside fla, and two revisions of the package."""

from __future__ import annotations

from benchmarks.titles import markdown


def patched(body: dict, words: dict) -> str:
    """Line for each model of fla: the operations and the whole step with fla's operations and with ours."""
    lines = []
    for (name,), rows in _by(body, ("model",), "ops").items():
        fla, ours = rows["fla"], rows["linattn"]
        apart = max(abs(a - b) for a, b in zip(fla["losses"], ours["losses"], strict=True))
        lines.append((name, *(_ratio(fla[key], ours[key], ".2f") for key in ("ops_ms", "step_ms")), f"{apart:.4f}"))
    return _table(body, words, "patched", lines)


def portable(body: dict, words: dict) -> str:
    """Line for each call: milliseconds of fla and of our portable kernels, and for training the peak memory."""
    lines = []
    for (family, shape, mode, decay), rows in _by(body, ("family", "shape", "mode", "decay"), "library").items():
        if len(rows) < 2:  # ours has changed since it was measured beside fla
            continue
        fla, ours = rows["fla"], rows["linattn"]
        memory = "" if ours["peak_mb"] is None else _ratio(fla["peak_mb"], ours["peak_mb"], ".0f")
        lines.append((family, "" if decay is None else f"{decay:g}", shape, mode, _ratio(fla["ms"], ours["ms"], ".2f"), memory))
    return _table(body, words, "portable", lines)


def revisions(body: dict, words: dict) -> str:
    """Line for each recurrence and shape: milliseconds of both passes in a CUDA graph, before and after."""
    lines = []
    for (family, shape), rows in _by(body, ("family", "shape"), "mode").items():
        lines.append((family, shape, *(_ratio(row["before_ms"], row["after_ms"], ".3f") for row in rows.values())))
    return _table(body, words, "revisions", lines)


def decays(body: dict, words: dict) -> str:
    """:func:`revisions` by mean decays."""
    lines = []
    for (family, decay, shape), rows in _by(body, ("family", "decay", "shape"), "mode").items():
        lines.append((family, f"{decay:g}", shape, *(_ratio(row["before_ms"], row["after_ms"], ".3f") for row in rows.values())))
    return _table(body, words, "decays", lines)


def _by(body: dict, names: tuple[str, ...], inner: str) -> dict[tuple, dict[str, dict]]:
    """Rows by the values of ``names`` and, within those, of ``inner``."""
    found: dict[tuple, dict[str, dict]] = {}
    for row in body["rows"]:
        found.setdefault(tuple(row[name] for name in names), {})[row[inner]] = row
    return found


def _ratio(theirs: float, ours: float, form: str) -> str:
    return f"{theirs:{form}} · {ours:{form}} ({theirs / ours:.2f} x)"


def _table(body: dict, words: dict, name: str, lines: list[tuple[str, ...]]) -> str:
    run = body["runs"][-1]
    told = words["one seed"].format(command=run["command"], cpu=body["card"], torch=run["torch"], date=run["date"])
    return f"{told}\n\n{markdown(words[name], lines)}"
