"""Data of the figures ``sheets`` and ``memory``: matrices under one slider."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import linattn
from linattn.atlas import lab, sentence
from linattn.atlas.page import rounded
from linattn.atlas.text import Both

WORDS = [word.en for word in sentence.SENTENCE]


def control(name: str, label: Both, shows: Sequence[Both | str], start: int = 0) -> dict[str, object]:
    """Slider with a name for each stop."""
    return {"name": name, "label": label._asdict(), "shows": [_words(s) for s in shows], "start": start}


def sheet(key: str, name: Both, values: Sequence[Tensor], rows: Sequence[Both | str] | None = None, cols: Sequence[Both | str] | None = None,
          cell: int = 22) -> dict[str, object]:  # fmt: skip
    """Sheet of one matrix, or one for each stop; NaN means no cell."""
    scale = max(v.nan_to_num().abs().max().item() for v in values)
    made: dict[str, object] = {"key": key, "name": name._asdict(), "values": [rounded(_cells(v)) for v in values], "cell": cell}
    for which, names in (("rowNames", rows), ("colNames", cols)):
        if names is not None:
            made[which] = [_words(n) for n in names]
    return {**made, "scale": rounded(scale)}


def number(key: str, name: Both, values: Sequence[float | Both | None]) -> dict[str, object]:
    """Number, or words, for each stop."""
    return {"key": key, "name": name._asdict(), "values": [v._asdict() if isinstance(v, Both) else rounded(v) for v in values]}


def sheets(control: Mapping[str, object], sheets: Sequence[object], numbers: Sequence[object] = ()) -> dict[str, object]:
    """Data of a figure."""
    return {"control": control, "sheets": list(sheets), "numbers": list(numbers)}


def causal(matrix: Tensor) -> Tensor:
    """Remove the cells above the diagonal of ``matrix`` [T, T]."""
    return matrix.masked_fill(torch.ones_like(matrix, dtype=torch.bool).triu(1), float("nan"))


def matrix(made: Mapping[str, Any]) -> Tensor:
    """Mixing matrix [T, T] of one call: its output where token j's value is the j-th unit vector."""
    length = made["q"].shape[1]
    return linattn.linear_attention(**{**made, "v": torch.eye(length, dtype=torch.float64)[None, :, None]})[0, :, 0]


def distance(a: Tensor, b: Tensor) -> float:
    """Relative distance of ``a`` to ``b``."""
    return ((a - b).norm() / b.norm()).item()


def memory(
    variants: Sequence[tuple[Both | str, Mapping[str, object]]], slider: tuple[str, Both] | None = None, start: int = 11, variant: int = 0
) -> dict[str, object]:
    """States and outputs of the running sentence for each of ``variants``: name and arguments of the op."""
    known = lab.vocabulary()
    runs = [lab.run(dict(made)) for _, made in variants]
    recalled = [lab.recalled(run.outputs, [word.en for word in known]) for run in runs]
    return {
        "tokens": sentence.tokens(),
        "words": [word._asdict() for word in known],
        "size": lab.SIZE,
        "start": start,
        "variant": variant,
        "scale": rounded(max(run.states.abs().max().item() for run in runs)),
        "loudest": rounded(max(r.abs().max().item() for r in recalled)),
        "control": {"name": slider[0], "label": slider[1]._asdict()} if slider else None,
        "variants": [
            {"show": _words(name), "states": rounded(run.states.tolist()), "recalled": rounded(r.tolist())}
            for (name, _), run, r in zip(variants, runs, recalled, strict=True)
        ],
    }


def said(figure: Mapping[str, object], variant: int, token: int, word: str) -> float:
    """Projection of the output after ``token`` (from 1) on ``word``, from the data of :func:`memory`."""
    names = [w["en"] for w in figure["words"]]  # type: ignore[attr-defined]
    return figure["variants"][variant]["recalled"][token - 1][names.index(word)]  # type: ignore[index]


def _words(words: Both | str) -> dict[str, str] | str:
    return words._asdict() if isinstance(words, Both) else words


def _cells(values: Tensor) -> list[list[float | None]]:
    return [[None if v != v else v for v in row] for row in values.tolist()]
