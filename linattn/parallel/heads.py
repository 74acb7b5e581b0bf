"""Partition of mixers and feed-forwards by heads or channels: a process's part is the same class with fewer of them.

A mixer of H heads and width D is the sum over n processes of mixers of H / n heads that read and write the whole width: projections into
heads are cut by rows, the output projection by columns. The part is made by the class itself, for width D / n and H / n heads; its
tensors are cut from the whole's if their shapes differ, else they are replicated.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from linattn.mixers import Mixer

COUNTS = ("heads", "kv_heads", "value_heads", "groups", "hidden")  # options with numbers of heads or channels
OUT = ("o_proj", "down_proj", "fc2")  # maps back to the model's width


@dataclass(frozen=True)
class Cut:
    """Cut of one tensor: along ``dim`` (None: every process has all of it), in equal parts of each of its ``sections``."""

    dim: int | None = None
    sections: tuple[int, ...] = ()
    once: bool = False  # a bias after the sum over processes, of which each adds its share

    def take(self, t: Tensor, rank: int, count: int) -> Tensor:
        """Select the part of ``t`` of process ``rank`` of ``count``."""
        if self.dim is None:
            return t
        return torch.cat([s.chunk(count, self.dim)[rank] for s in t.split(self.sections or t.shape[self.dim], self.dim)], self.dim)

    def order(self, count: int) -> Tensor | None:
        """Indices along ``dim`` of the whole's entries in the concatenated parts; None if the order is unchanged."""
        if len(self.sections) < 2:
            return None
        places = torch.arange(sum(self.sections))
        flat = Cut(0, self.sections)
        return torch.cat([flat.take(places, rank, count) for rank in range(count)])


def refusal(module: Mixer, options: dict[str, Any], count: int) -> str | None:
    """Reason why ``module`` cannot be cut into ``count`` parts, or None if it can."""
    if module.heads_apart is None:
        return "its heads are not independent"
    for name, value in _counts(module, options).items():
        if value % count:
            return f"its {value} {name} are not a multiple of {count}"
    return None


def part(module: Mixer, options: dict[str, Any], count: int) -> tuple[Mixer, dict[str, Cut]]:
    """Make a module, with tensors to be filled, for one of ``count`` processes, and the cuts of the whole's tensors.

    Args:
        module: the whole, for which :func:`refusal` returns None.
        options: options of its constructor, without the width.
        count: number of processes.
    """
    cls, dim = type(module), module.dim
    assert dim is not None
    counts = _counts(module, options)
    given = {name: value for name, value in options.items() if name not in counts}
    with torch.random.fork_rng(devices=[]):
        own = cls(dim if "hidden" in counts else dim // count, **given, **{name: value // count for name, value in counts.items()})
    own.dim = dim
    whole = dict(tensors(module))
    return own, {name: _cut(module, name, whole[name], t, count) for name, t in tensors(own)}


def fill(own: Mixer, whole: dict[str, Tensor], cuts: dict[str, Cut], rank: int, count: int) -> None:
    """Fill ``own`` with the parts of process ``rank`` of the tensors of ``whole``."""
    for name, cut in cuts.items():
        t = cut.take(whole[name].detach(), rank, count).clone()
        put(own, name, nn.Parameter(t, whole[name].requires_grad) if isinstance(whole[name], nn.Parameter) else t)


def put(module: nn.Module, name: str, t: Tensor) -> None:
    """Set the parameter or buffer ``name`` of ``module``."""
    path, _, last = name.rpartition(".")
    owner = reduce(getattr, path.split(".") if path else [], module)
    held = owner._parameters if isinstance(t, nn.Parameter) else owner._buffers
    held[last] = t  # type: ignore[assignment]


def tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers of ``module`` by name."""
    yield from module.named_parameters()
    yield from module.named_buffers()


def _counts(module: Mixer, options: dict[str, Any]) -> dict[str, int]:
    """Numbers of heads, groups or channels among a constructor's options, with its defaults."""
    known = {name: p.default for name, p in inspect.signature(type(module)).parameters.items()}
    asked = {name: options.get(name, known[name]) for name in COUNTS if name in known}
    if "hidden" in asked:
        asked["hidden"] = next(getattr(module, name).weight.shape[1] for name in OUT if hasattr(module, name))
    return {name: value for name, value in asked.items() if isinstance(value, int)}


def _sections(module: Mixer, name: str, size: int) -> tuple[int, ...]:
    """Sizes of the sections of a fused map of ``size`` rows; empty if it is not fused."""
    fused = dict(entry.split(": ") for entry in module.heads_apart or ())
    names = fused.get(name.split(".", maxsplit=1)[0], "").split()
    shares = [n for attribute in names for n in _whole_numbers(getattr(module, attribute))]
    return tuple(size * n // sum(shares) for n in shares)


def _whole_numbers(value: int | Sequence[int]) -> Sequence[int]:
    return (value,) if isinstance(value, int) else value


def _cut(module: Mixer, name: str, whole: Tensor, own: Tensor, count: int) -> Cut:
    """Cut of one tensor; ``own`` has the shape of a part, but for the model's width."""
    owner, _, last = name.partition(".")
    if owner in OUT:
        return Cut(once=True) if last == "bias" else Cut(1)
    if whole.shape == own.shape:
        return Cut()
    differing = [i for i, (n, small) in enumerate(zip(whole.shape, own.shape, strict=True)) if n != small]
    dim = differing[0]
    if last.endswith("weight") and dim == 1:
        return Cut()  # a map from the model's width to channels that every process has
    sections = _sections(module, name, whole.shape[dim])
    if whole.shape[dim] != count * own.shape[dim] or any(n % count for n in sections):
        raise ValueError(f"{name} of shape {list(whole.shape)} and sections {list(sections)} cannot be cut in {count}")
    return Cut(dim, sections)
