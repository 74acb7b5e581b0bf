"""Families of mixers: those of the survey of efficient Transformers (arXiv 2009.06732), and later ones."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from linattn.mixers.registry import Info

FAMILIES = (
    "softmax attention",
    "fixed patterns",
    "combined patterns",
    "learnable patterns",
    "neural memory",
    "kernels",
    "low rank",
    "recurrence",
    "down-sampling",
    "sparse",
    "linear attention of images",
    "linear attention with decay",
    "delta rule",
    "memories learned at test time",
    "state spaces",
    "RWKV",
    "recurrent networks",
    "convolutions",
    "feed-forwards",
    "others",
)


def families(info: Info) -> tuple[str, ...]:
    """Families of a mixer, in the order of :data:`FAMILIES`; the mixer is listed under the first.

    Its registration may name several, as in the survey's figure 2; else it has the ``FAMILY`` of its file's package.
    """
    package = sys.modules.get(info.cls.__module__.rpartition(".")[0])
    return tuple(sorted(info.families, key=FAMILIES.index)) or (getattr(package, "FAMILY", "others"),)
