"""Table of a family's weights: lines that map their weights to ours, in either direction.

A line has the names on both sides and a conversion each way. Shapes are not listed: writing our tensors on the meta device gives
the names and shapes that a checkpoint must have, so that reading and checking agree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Size, Tensor

from linattn import ffn, mixers
from linattn.models import LMConfig

Read = Callable[[list[Tensor], list[Size]], list[Tensor]]
Write = Callable[[list[Tensor]], list[Tensor]]


@dataclass(frozen=True)
class Line:
    """Line that maps the weights ``theirs`` of a checkpoint to ``ours``, with the same numbers.

    ``read`` takes their tensors and our shapes, ``write`` takes our tensors; both return the tensors of the other side. Weights of an
    ``optional`` line may be missing from a checkpoint and are not read. ``merged`` is the line of a checkpoint that has, in
    place of published names, those of transformers' modules, in which several published weights are one.
    """

    theirs: tuple[str, ...]
    ours: tuple[str, ...]
    read: Read
    write: Write
    optional: bool = False
    merged: Line | None = None


@dataclass(frozen=True)
class Family:
    """Family of published models.

    ``fields`` converts the published config to fields of LMConfig, ``config`` does the reverse, and ``weights`` returns the lines;
    the first two raise ValueError for what the other side cannot express. ``config_of`` completes a ``config.json`` with the
    defaults that it leaves out. ``tied`` are the published names of the embedding and the head; a checkpoint whose config ties them
    may hold both or only the first. If ``ties`` is False a published checkpoint has both, regardless of its config.
    ``aliases`` are patterns in the names of older or newer checkpoints, with their replacement in the names of the lines. Weights
    whose names match ``ignored`` are skipped, as in the published implementation.
    """

    model_type: str
    architecture: str
    tied: tuple[str, str]
    config_of: Callable[[dict[str, Any]], Any]
    fields: Callable[[Any], dict[str, Any]]
    config: Callable[[LMConfig], dict[str, Any]]
    weights: Callable[[LMConfig], Iterable[Line]]
    aliases: dict[str, str] = field(default_factory=dict)
    ignored: str | None = None
    ties: bool = True

    def lines(self, ours: LMConfig) -> list[Line]:
        """List the lines of a whole model, embedding and head included."""
        embedding, head = self.tied
        ends = [same(embedding, "model.embedding.weight")] + ([] if ours.tie_embeddings and self.ties else [same(head, "lm_head.weight")])
        return [*ends, *self.weights(ours)]


def same(theirs: str, ours: str, *shape: int) -> Line:
    """Map one weight with two names; the published one has ``shape``, by default that of the linattn weight."""
    return Line((theirs,), (ours,), lambda t, shapes: [t[0].reshape(shapes[0])], lambda t: [t[0].reshape(shape) if shape else t[0]])


def split(theirs: str, *ours: str) -> Line:
    """Map one published weight to the rows of several linattn weights, in sequence."""
    return Line((theirs,), ours, lambda t, shapes: list(t[0].split([s[0] for s in shapes])), lambda t: [torch.cat(t)])


def join(ours: str, theirs: Sequence[str], rows: Sequence[int]) -> Line:
    """Map one linattn weight to the rows of several published weights, ``rows`` of each."""
    return Line(tuple(theirs), (ours,), lambda t, _: [torch.cat(t)], lambda t: list(t[0].split(list(rows))))


def stack(ours: str, theirs: Sequence[str]) -> Line:
    """Map one linattn weight to several published ones along a new first axis: the experts of a mixture."""
    return Line(tuple(theirs), (ours,), lambda t, _: [torch.stack(t)], lambda t: list(t[0].unbind()))


def part(theirs: str, ours: str, index: int, of: int, axis: int) -> Line:
    """Map one linattn weight to one of ``of`` equal parts of a published one along ``axis``. For reading only."""
    return Line((theirs,), (ours,), lambda t, _: [t[0].chunk(of, axis)[index].clone()], lambda t: [torch.cat(of * [t[0]], axis)])


def transposed(theirs: str, ours: str) -> Line:
    """Map a published matrix to the transpose of this library's."""
    return Line((theirs,), (ours,), lambda t, _: [t[0].mT.contiguous()], lambda t: [t[0].mT.contiguous()])


def made(theirs: Sequence[str], make: Callable[[], list[Tensor]]) -> Line:
    """Skip weights of some checkpoints that follow from the config when reading; recompute them by ``make`` when writing."""
    return Line(tuple(theirs), (), lambda t, shapes: [], lambda t: make(), optional=True)


def named(names: Iterable[tuple[str, str]], suffix: str = ".weight") -> list[Line]:
    """Make a line for each pair (theirs, ours)."""
    return [same(theirs + suffix, ours + suffix) for theirs, ours in names]


def under(theirs: str, ours: str, lines: Iterable[Line]) -> Iterator[Line]:
    """Prefix the names of a part of a model with ``theirs`` and ``ours``."""
    for line in lines:
        merged = None if line.merged is None else next(under(theirs, ours, [line.merged]))
        here, there = tuple(ours + name for name in line.ours), tuple(theirs + name for name in line.theirs)
        yield replace(line, theirs=there, ours=here, merged=merged)


def only(config: Any, model_type: str, **wanted: Any) -> None:
    """Raise ValueError for a config with other values than ``wanted``, which our model cannot express.

    A tuple among them lists the values that are allowed.
    """
    for name, value in wanted.items():
        allowed = value if isinstance(value, tuple) else (value,)
        came = getattr(config, name)
        if came not in allowed:
            raise ValueError(f"{model_type}: {name} must be {' or '.join(map(repr, allowed))} to be read, but is {came!r}")


def some(config: Any, model_type: str, *names: str) -> None:
    """Raise ValueError for a config in which a field of ``names`` is below 1."""
    for name in names:
        if not getattr(config, name):
            raise ValueError(f"{model_type}: {name} must be at least 1 to be read, but is {getattr(config, name)!r}")


def repeated(names: Sequence[str]) -> str:
    """Compress the names of all layers to a pattern: gla, gla, gla, softmax -> ``"gla*3, softmax"``."""
    runs: list[list[Any]] = []
    for name in names:
        if runs and runs[-1][0] == name:
            runs[-1][1] += 1
        else:
            runs.append([name, 1])
    return ", ".join(name if count == 1 else f"{name}*{count}" for name, count in runs)


def mixer_of(ours: LMConfig, name: str, *, last: bool = False) -> Any:
    """Build mixer ``name`` of the first layer of that kind, or the ``last``, on the meta device, to read its sizes."""
    layers = [i for i, mixer in enumerate(ours.mixer_names) if mixer == name]
    if not layers:
        raise ValueError(f"it has no {name} layers, only {', '.join(dict.fromkeys(ours.mixer_names))}")
    with torch.device("meta"):
        return mixers.create(name, dim=ours.dim, **ours.options_of(layers[-1 if last else 0]))


def ffn_of(ours: LMConfig, name: str) -> Any:
    """Build feed-forward ``name`` in the same way as :func:`mixer_of`."""
    layers = [i for i, kind in enumerate(ours.ffn_names) if kind == name]
    if not layers:
        raise ValueError(f"it has no {name} feed-forwards, only {', '.join(dict.fromkeys(ours.ffn_names))}")
    with torch.device("meta"):
        return ffn.create(name, ours.dim, **ours.ffn_options_of(layers[0]))


def interleaved(theirs: str, ours: Sequence[str], groups: int, rows: Sequence[int], into: Sequence[int]) -> Line:
    """Map a published weight with ``rows`` of several parts for each of ``groups`` heads to ours, where each part has all heads.

    ``into``: number of consecutive parts in each of ``ours``.
    """

    def read(t: list[Tensor], _: list[Size]) -> list[Tensor]:
        parts = [part.flatten(0, 1) for part in t[0].unflatten(0, (groups, -1)).split(list(rows), 1)]
        ends = [sum(into[: i + 1]) for i in range(len(into))]
        return [torch.cat(parts[end - count : end]) for end, count in zip(ends, into, strict=True)]

    def write(t: list[Tensor]) -> list[Tensor]:
        parts = torch.cat(t).split([groups * count for count in rows])
        return [torch.cat([part.unflatten(0, (groups, -1)) for part in parts], 1).flatten(0, 1)]

    return Line((theirs,), tuple(ours), read, write)
