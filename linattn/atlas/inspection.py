"""Inspection of one system on the running sentence, computed by a new mixer: its recurrence, its matrix, its states.

Nothing depends on names of systems, so a newly registered mixer is inspected like the others. Missing parts have the library's reason.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from linattn.atlas import sentence
from linattn.atlas.algebra import Spec, matrices, nonlinearity, specification
from linattn.atlas.chinese import both
from linattn.atlas.text import Both
from linattn.mixers import Mixer, create, info
from linattn.mixers.registry import Info
from linattn.mixers.taxonomy import families

HEADS = 4  # heads of a matrix that are shown
SHOWN = 6  # rows and columns of a state that are shown
VECTOR = 24  # channels of a vector that are shown
RULES = ("none", "constant", "head", "channel", "erase", "scores", "other")  # scores: keeps every token and compares the query with each
PAIRED = ("sequence", "cross", "grid")  # kinds with a mixing matrix of tokens
FIRST = ("S", "c", "h", "memory")  # the state shown if a mixer has several: a matrix, a cell, a hidden state


@dataclass(frozen=True)
class States:
    """State after each token: ``values[t][head]`` is a matrix; ``None`` for rows that a growing one does not have yet."""

    name: str
    shape: tuple[int, ...]  # after the last token, one sequence
    grows: bool
    heads: int
    values: list[list[list[list[float | None]]]]


@dataclass(frozen=True)
class Inspection:
    """Results of inspecting one system; ``None`` with a reason in ``missing`` for absent parts."""

    info: Info
    options: dict[str, object]
    spec: Spec | None = None
    matrix: list[list[list[float]]] | None = None  # [matrices shown][query][key]: head by head, of each head value by value
    heads: int = 0  # heads of the mixer, including those not shown
    values: int = 1  # values per token and head, with a matrix each
    nonlinearity: float | None = None  # relative distance from linearity in the values, None without values
    states: States | None = None
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)  # shapes of all states after the last token
    stepping: float | None = None  # relative distance of single steps to one pass
    missing: dict[str, Both] = field(default_factory=dict)

    @property
    def rule(self) -> str:
        """Operation on the state before a write, one of :data:`RULES`."""
        if self.spec:
            return self.spec.rule
        return "other" if self.info.recurrent else "scores"

    @property
    def family(self) -> str:
        """First of its families in :mod:`linattn.mixers.taxonomy`."""
        return families(self.info)[0]

    @property
    def claim(self) -> str:
        """Relation of its code to the recurrence: "recurrence", "steps" (several per token), "weighed" (values, otherwise weighed) or
        "own".
        """
        if self.spec:
            return "recurrence" if self.spec.steps == 1 else "steps"
        return "own" if self.nonlinearity is None else "weighed"

    @property
    def title(self) -> Both:
        """Title in both languages."""
        return both(self.info.title, self.info.chinese)

    @property
    def code(self) -> str:
        """Source of the mixer's own file, without the keys of the introductions that name it."""
        path = inspect.getsourcefile(self.info.cls)
        return re.sub(r"^ *seeds=\(.*\),\n", "", Path(path).read_text(encoding="utf-8"), flags=re.M) if path else ""


def inspect_mixer(name: str) -> Inspection:
    """Inspect the mixer ``name`` of width :data:`sentence.DIM` with default options and initial weights of seed 0, in float64."""
    known = info(name)
    defaults = {k: p.default for k, p in inspect.signature(known.cls).parameters.items() if p.default is not p.empty}
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(sentence.SEED)
        mixer = create(name, dim=sentence.DIM).double().eval()
        return _inspection(known, defaults, mixer, sentence.embedded())


def _inspection(known: Info, options: dict[str, object], mixer: Mixer, x: Tensor) -> Inspection:
    missing: dict[str, Both] = {}
    paired = known.kind in PAIRED
    spec = specification(mixer, x) if paired else None
    found = matrices(mixer, x) if paired else None
    linear = nonlinearity(mixer, x) if paired else None
    if found is None:
        missing["matrix"] = NO_PAIRS if not paired else NO_VALUES if linear is None else OF_CHANNELS
    elif spec is not None and spec.decay != "none" and _nothing_fades(found.cells):
        spec = replace(spec, decay="none")
    shown, heads, values = (found.cells[:HEADS].tolist(), len(found.cells) // found.values, found.values) if found else (None, 0, 1)
    seen = Inspection(known, options, spec, shown, heads, values, linear, missing=missing)
    if spec is None:
        missing["spec"] = NO_PAIRS if not paired else OWN_MIX if linear is None else OWN_WEIGHTS
    if not known.resumable:
        missing["states"] = NOTHING_HANDED if known.kind == "feed-forward" else NO_STATE
        return seen
    steps, stepping = _steps(mixer, x)
    shapes = {k: tuple(t.shape[1:]) for k, t in steps[-1].items() if k != "position"}
    return replace(seen, states=states_of(steps), shapes=shapes, stepping=stepping)


NO_PAIRS = Both("its tokens do not read each other one by one", "它的 token 之间并不逐个互读")
NO_VALUES = Both(
    "its code makes no queries, keys and values, so there are no values for a matrix to weigh",
    "它的代码不产生查询、键与值，所以没有可供矩阵加权的值",
)
OF_CHANNELS = Both(
    "its output is linear in the values, but the channels of a value do not share one matrix per head",
    "它的输出对值是线性的，但一个值的各个通道并不共用每个头的同一个矩阵",
)
OWN_MIX = Both("its code mixes the tokens by its own update rule", "它的代码用自己的更新规则来混合 token")
OWN_WEIGHTS = Both(
    "its code makes queries, keys and values, but weighs the values in a way of its own", "它的代码产生查询、键与值，但按自己的方式给值加权"
)
NOTHING_HANDED = Both("it passes nothing from token to token", "它不在 token 之间传递任何东西")
NO_STATE = Both(
    "it takes all tokens at once, so there is no state from token to token", "它一次读入全部 token，所以没有逐个 token 传递的状态"
)


def _nothing_fades(matrix: Tensor) -> bool:
    """True if equal words have equal weights at every distance, [H, T, T]: then a decay only rescales and cancels."""
    words = [word.en for word in sentence.SENTENCE]
    pairs = [(i, j) for j in range(len(words)) for i in range(j) if words[i] == words[j]]
    return all(torch.allclose(matrix[:, j:, i], matrix[:, j:, j], rtol=0.05) for i, j in pairs)  # tolerance, since their small ε decays too


def _steps(mixer: Mixer, x: Tensor) -> tuple[list[dict[str, Tensor]], float]:
    """States after each token, and the largest relative error of outputs and last states between single steps and one pass."""
    whole, last = cast("tuple[Tensor, dict[str, Tensor]]", mixer(x, return_state=True))
    state, outputs, states = None, [], []
    for t in range(x.shape[1]):
        y, state = cast("tuple[Tensor, dict[str, Tensor]]", mixer(x[:, t : t + 1], state, return_state=True))
        outputs.append(y)
        states.append(dict(state))
    pairs = [(torch.cat(outputs, 1), whole), *((states[-1][k], t) for k, t in last.items() if t.is_floating_point())]
    alike = [(a, b) for a, b in pairs if a.shape == b.shape and b.norm() > 0]  # states kept only for speed may differ in size
    return states, max((((a - b).norm() / b.norm()).item() for a, b in alike), default=0.0)


def states_of(steps: list[dict[str, Tensor]]) -> States | None:
    """State that holds the past, after each step; None if there is none but the position."""
    last = {k: t for k, t in steps[-1].items() if t.is_floating_point() and k != "position"}
    if not last:
        return None
    name = next((k for k in FIRST if k in last), None) or max(sorted(last), key=lambda k: last[k].numel())
    shape = tuple(last[name].shape[1:])
    grows = any(step[name].shape != last[name].shape for step in steps)
    first = 0 if grows else _first(_heads(last[name][0], grows)[0])
    values = [[_corner(head[first:], grows, shape[0]) for head in _heads(step[name][0], grows)] for step in steps]
    return States(name, shape, grows, len(_heads(last[name][0], grows)), [heads[:2] for heads in values])


def _heads(t: Tensor, grows: bool) -> list[Tensor]:
    """Convert a state to one matrix a head: a vector is a row, a growing state has a row per token, complex numbers are adjacent pairs."""
    if t.ndim == 1:
        return [t[None]]
    if t.ndim == 2:
        return [t]
    if grows:
        return list(t.flatten(2).unbind(1)) if t.ndim > 2 else [t]
    if t.ndim == 4 and t.shape[-1] != 2:
        t = t.flatten(0, 1)
    return list(t.flatten(2).unbind(0))


def _first(t: Tensor) -> int:
    """First row to show: the first non-empty one of a memory of past tokens [slots, channels], else 0."""
    filled = t.abs().sum(-1).nonzero()
    return 0 if len(filled) == 0 else min(int(filled[0]), max(len(t) - SHOWN, 0))


def _corner(t: Tensor, grows: bool, length: int) -> list[list[float | None]]:
    """Cut a state to the part that is shown, with empty rows for tokens to come."""
    rows: list[list[float | None]] = t[: length if grows else SHOWN, : VECTOR if t.shape[0] == 1 and not grows else SHOWN].tolist()
    missing = (length if grows else 0) - len(rows)
    return rows + [[None] * len(rows[0])] * max(missing, 0) if rows else rows
