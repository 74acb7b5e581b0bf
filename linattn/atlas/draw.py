"""Drawings of one system as SVG files, for papers and slides: the atlas's cell, matrix, state and cost."""

from __future__ import annotations

from linattn.atlas import sentence
from linattn.atlas.cell import cell
from linattn.atlas.inspection import Inspection, inspect_mixer
from linattn.atlas.svg import alone, grid
from linattn.atlas.text import Both, possessive
from linattn.mixers import cost, info
from linattn.report.plot import Axis, Heading, Series, lines
from linattn.report.scales import logarithmic
from linattn.report.words import memory_tick, tokens

KINDS = ("cell", "mask", "state", "cost")
COST = {
    "tokens": Both("tokens", "token 数"),
    "bytes": Both("bytes kept by a layer of width 512", "宽 512 的一层所保留的字节数"),
    "title": Both("What {} keeps", "{} 要保留多少"),
    "told": Both("Bytes of state of {} and of softmax attention against tokens.", "{} 与 softmax 注意力的状态字节数随 token 数的变化。"),
}
LENGTHS = tuple(1 << n for n in range(8, 21, 2))  # tokens of the cost's axis


def draw(name: str, what: str, *, language: str = "en", scheme: str = "light", head: int = 0) -> str:
    """Draw one figure and return the content of an SVG file.

    Args:
        name: a registered mixer.
        what: "cell" (what decays, is erased, written, read), "mask" (the mixing matrix on the running sentence), "state" (after
            the last token) or "cost" (bytes kept against length, beside softmax).
        language: language of its words, "en" or "zh".
        scheme: colours for a "light" or a "dark" background.
        head: head of a matrix or state, from 0.

    Raises:
        ValueError: for another name, kind, language, scheme or head, and, with the reason, for a figure that the mixer does not have.
    """
    if what not in KINDS:
        raise ValueError(f"what must be one of {', '.join(KINDS)}, but came as {what!r}")
    seen = inspect_mixer(name)
    made = {
        "cell": lambda: cell(seen),
        "mask": lambda: mask(seen, head, named=True),
        "state": lambda: _state(seen, head),
        "cost": lambda: _cost(seen, language),
    }
    return alone(made[what](), language, scheme)


def mask(seen: Inspection, head: int, *, named: bool = False) -> str:
    """Draw a head's mixing matrix as an SVG element, with the words of the sentence beside it if ``named``."""
    if seen.matrix is None:
        raise ValueError(f"{seen.info.name} has no matrix to draw: {seen.missing['matrix'].en}")
    matrix = _chosen(seen.matrix, head)
    shown = [[None if seen.info.causal and j > i else value for j, value in enumerate(row)] for i, row in enumerate(matrix)]
    label = Both(f"Mixing matrix of {seen.title.en}", f"{possessive(seen.title.zh)}混合矩阵")
    names = sentence.SENTENCE if named else None
    return grid(shown, _largest(seen.matrix), label, names, names)


def _state(seen: Inspection, head: int) -> str:
    if seen.states is None:
        raise ValueError(f"{seen.info.name} has no state to draw: {seen.missing['states'].en}")
    values = _chosen(seen.states.values[-1], head)
    label = Both(f"State {seen.states.name} of {seen.title.en} after the sentence", f"{seen.title.zh} 读完句子后的状态 {seen.states.name}")
    return grid(values, _largest(seen.states.values), label, sentence.SENTENCE if seen.states.grows else None)


def _chosen(heads: list, head: int) -> list:
    if not 0 <= head < len(heads):
        raise ValueError(f"head must be from 0 to {len(heads) - 1}, but came as {head}")
    return heads[head]


def _largest(values: object) -> float:
    if isinstance(values, list):
        return max((_largest(v) for v in values), default=0.0)
    return abs(values) if isinstance(values, float | int) else 0.0


def _cost(seen: Inspection, language: str) -> str:
    """Plot bytes against length as in reports, in one language."""
    if not seen.info.resumable:
        raise ValueError(f"{seen.info.name} keeps nothing from token to token, so there are no bytes to draw")
    words = {key: both.zh if language == "zh" else both.en for key, both in {**COST, "name": seen.title}.items()}
    names = dict.fromkeys((seen.info.name, "softmax"))
    found = {n: [(float(t), float(_kept(n, t))) for t in LENGTHS] for n in names}
    axes = (
        Axis(words["tokens"], logarithmic(LENGTHS, base=2), tokens),
        Axis(words["bytes"], logarithmic([b for points in found.values() for _, b in points], base=2), memory_tick),
    )
    heading = Heading("cost", words["title"].format(words["name"]), words["told"].format(words["name"]))
    svg = lines(heading, [Series(n, points, i) for i, (n, points) in enumerate(found.items())], *axes)
    return svg.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)


def _kept(name: str, tokens: int) -> int:
    """Bytes of state after ``tokens`` tokens; a constant state is measured after a few."""
    return cost(name, dim=512, tokens=LENGTHS[0] if info(name).recurrent else tokens).state_bytes or 0
