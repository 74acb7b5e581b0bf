"""Inspection of one system on the running sentence, computed by its newly created mixer: its recurrence, its matrix, its states.

No system is known by name here, so a newly registered mixer is inspected like the others. Parts that a mixer does not have come
with the library's reason.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from linattn.atlas import sentence
from linattn.atlas.chinese import both
from linattn.atlas.text import Both
from linattn.mixers import CallContext, Mixer, create, info, mixing_matrix
from linattn.mixers.base import Recurrence
from linattn.mixers.registry import Info

HEADS = 4  # heads of a matrix that are shown
SHOWN = 6  # rows and columns of a state that are shown
VECTOR = 32  # channels of a vector that are shown
FAMILIES = ("none", "constant", "head", "channel", "erase", "scores", "other")  # scores: keeps every token and compares with each
PAIRED = ("sequence", "cross", "grid")  # kinds in which tokens read tokens
FIRST = ("S", "c", "h", "memory")  # the states that hold the past, where a mixer has several: a matrix, a cell, a hidden state


@dataclass(frozen=True)
class Spec:
    """Specification of a mixer's recurrence, from which its cell is drawn.

    Args:
        decay: "none", "constant", "head" or "channel".
        erase: "none", "delta" (beta) or "pair" (erase).
        bonus: the token itself is read by a weight of its own, before it is written.
        normalize: the output is divided by q z.
        skip: the value is added to the output.
        sizes: H, K and V.
    """

    decay: str
    erase: str
    bonus: bool
    normalize: bool
    skip: bool
    sizes: tuple[int, int, int]

    @property
    def family(self) -> str:
        """Family of the recurrence, by its operation on the state before a write: none, constant, head, channel or erase."""
        return "erase" if self.erase != "none" else self.decay


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
    matrix: list[list[list[float]]] | None = None  # [heads shown][query][key]
    heads: int = 0  # of the matrix, shown or not
    states: States | None = None
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)  # of all states after the last token
    stepping: float | None = None  # relative distance of single steps to one pass
    missing: dict[str, Both] = field(default_factory=dict)

    @property
    def family(self) -> str:
        """Family of the system, one of :data:`FAMILIES`."""
        if self.spec:
            return self.spec.family
        return "other" if self.info.recurrent else "scores"

    @property
    def title(self) -> Both:
        """Title in both languages."""
        return both(self.info.title, self.info.chinese)

    @property
    def code(self) -> str:
        """Source of the mixer's own file."""
        path = inspect.getsourcefile(self.info.cls)
        return Path(path).read_text(encoding="utf-8") if path else ""


def inspect_mixer(name: str) -> Inspection:
    """Inspect the mixer ``name`` of width :data:`sentence.DIM` with its own options, weights as created from seed 0, in float64."""
    known = info(name)
    defaults = {k: p.default for k, p in inspect.signature(known.cls).parameters.items() if p.default is not p.empty}
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(sentence.SEED)
        mixer = create(name, dim=sentence.DIM).double().eval()
        return _inspection(known, defaults, mixer, sentence.embedded())


def _inspection(known: Info, options: dict[str, object], mixer: Mixer, x: Tensor) -> Inspection:
    missing: dict[str, Both] = {}
    spec = specification(mixer, x) if known.kind in PAIRED else None
    matrix, heads = None, 0
    if known.kind in PAIRED and known.linear_in_values:
        found = mixing_matrix(mixer, *mixer.arguments(x))[0]
        matrix, heads = found[:HEADS].tolist(), found.shape[0]
        if spec is not None and spec.decay != "none" and _nothing_fades(found):
            spec = replace(spec, decay="none")
    else:
        missing["matrix"] = NO_PAIRS if known.kind not in PAIRED else NOT_LINEAR
    if spec is None:
        missing["spec"] = NO_PAIRS if known.kind not in PAIRED else OWN_RULES
    if not known.resumable:
        why = NOTHING_HANDED if known.kind == "feed-forward" else NO_STATE
        return Inspection(known, options, spec, matrix, heads, missing={**missing, "states": why})
    steps, stepping = _steps(mixer, x)
    shapes = {k: tuple(t.shape[1:]) for k, t in steps[-1].items() if k != "position"}
    return Inspection(known, options, spec, matrix, heads, states_of(steps), shapes, stepping, missing)


NO_PAIRS = Both("its tokens do not read each other one by one", "它的 token 之间不逐个相互读取")
NOT_LINEAR = Both(
    "its output is no weighted sum of values that the tokens write, so no matrix says who reads whom",
    "它的输出不是各 token 所写之值的加权和，所以没有一个矩阵能说明谁读了谁",
)
OWN_RULES = Both(
    "its tokens mix by rules of its own and not by the one linear recurrence", "它的 token 按自己的规则混合，不是那个统一的线性递推"
)
NOTHING_HANDED = Both("it hands nothing from token to token", "它不在 token 之间传递任何东西")
NO_STATE = Both(
    "it takes all tokens at once, so there is no state from token to token", "它一次读入全部 token，所以没有逐个 token 传递的状态"
)


def specification(mixer: Mixer, x: Tensor) -> Spec | None:
    """Specification of the recurrence of ``mixer``; None if its output on ``x`` is not that recurrence's."""
    if type(mixer).project is Mixer.project:
        return None
    r = mixer.recurrence(x, _carry(mixer, x))
    if not _is_recurrence(mixer, r, x):
        return None
    decay = "none" if r.decay is None else "constant" if r.decay.ndim <= 2 else "head" if r.decay.ndim == 3 else "channel"
    return Spec(
        decay=decay,
        erase="delta" if r.beta is not None else "pair" if r.erase is not None else "none",
        bonus=r.bonus is not None,
        normalize=r.normalize is not False,
        skip=r.skip is not None,
        sizes=(max(r.q.shape[2], r.v.shape[2]), r.k.shape[3], r.v.shape[3]),
    )


def _is_recurrence(mixer: Mixer, r: Recurrence, x: Tensor) -> bool:
    """True if the plain recurrence of ``r``, read by the mixer, gives the mixer's output, up to the mixer's own division."""
    if r.v.shape[1] != x.shape[1] or r.k.shape[:3] != r.q.shape[:3] or r.v.shape[2] % r.k.shape[2]:
        return False
    plain = cast("Tensor | tuple[Tensor, Tensor]", Mixer.attend(mixer, r, _carry(mixer, x)))  # a pair where r.normalize is "return"
    if not isinstance(plain, Tensor):
        own = mixer.attend(r, _carry(mixer, x))
        ratio = own / plain[0]  # [B, T, H, V]: one number for a head of a token
        return torch.allclose(ratio, ratio[..., :1].expand_as(ratio), rtol=1e-6)
    if type(mixer).mix is Mixer.mix:
        return torch.allclose(mixer.attend(r, _carry(mixer, x)), plain, rtol=1e-8, atol=1e-10)
    o = plain if r.skip is None else plain + r.skip
    return torch.allclose(mixer.read(o, x), mixer(*mixer.arguments(x)), rtol=1e-8, atol=1e-10)


def _carry(mixer: Mixer, x: Tensor) -> CallContext:
    return mixer.begin(*mixer.arguments(x))


def _nothing_fades(matrix: Tensor) -> bool:
    """True if equal words count equally at every distance, [H, T, T]: then a decay only keeps numbers small and cancels."""
    words = [word.en for word in sentence.SENTENCE]
    pairs = [(i, j) for j in range(len(words)) for i in range(j) if words[i] == words[j]]
    return all(torch.allclose(matrix[:, j:, i], matrix[:, j:, j], rtol=0.05) for i, j in pairs)  # their small ε fades, too


def _steps(mixer: Mixer, x: Tensor) -> tuple[list[dict[str, Tensor]], float]:
    """States after each token, and the largest relative error of outputs and last states between single steps and one pass."""
    whole, last = cast("tuple[Tensor, dict[str, Tensor]]", mixer(x, return_state=True))
    state, outputs, states = None, [], []
    for t in range(x.shape[1]):
        y, state = cast("tuple[Tensor, dict[str, Tensor]]", mixer(x[:, t : t + 1], state, return_state=True))
        outputs.append(y)
        states.append(dict(state))
    pairs = [(torch.cat(outputs, 1), whole), *((states[-1][k], t) for k, t in last.items() if t.is_floating_point())]
    alike = [(a, b) for a, b in pairs if a.shape == b.shape and b.norm() > 0]  # what is kept only for speed may be cut differently
    return states, max((((a - b).norm() / b.norm()).item() for a, b in alike), default=0.0)


def states_of(steps: list[dict[str, Tensor]]) -> States | None:
    """State that holds the past, after each step; None if there is none but the position."""
    last = {k: t for k, t in steps[-1].items() if t.is_floating_point() and k != "position"}
    if not last:
        return None
    name = next((k for k in FIRST if k in last), None) or max(sorted(last), key=lambda k: last[k].numel())
    shape = tuple(last[name].shape[1:])
    grows = any(step[name].shape != last[name].shape for step in steps)
    values = [[_corner(head, grows, shape[0]) for head in _heads(step[name][0], grows)] for step in steps]
    return States(name, shape, grows, len(_heads(last[name][0], grows)), [heads[:2] for heads in values])


def _heads(t: Tensor, grows: bool) -> list[Tensor]:
    """Convert a state to one matrix a head: a vector is a row, a growing state has a row per token, pairs of reals are adjacent."""
    if t.ndim == 1:
        return [t[None]]
    if t.ndim == 2:
        return [t]
    if grows:
        return list(t.flatten(2).unbind(1)) if t.ndim > 2 else [t]
    if t.ndim == 4 and t.shape[-1] != 2:
        t = t.flatten(0, 1)
    return list(t.flatten(2).unbind(0))


def _corner(t: Tensor, grows: bool, length: int) -> list[list[float | None]]:
    """Cut a state to the part that is shown, with empty rows for tokens to come."""
    rows: list[list[float | None]] = t[: length if grows else SHOWN, : VECTOR if t.shape[0] == 1 and not grows else SHOWN].tolist()
    missing = (length if grows else 0) - len(rows)
    return rows + [[None] * len(rows[0])] * max(missing, 0) if rows else rows
