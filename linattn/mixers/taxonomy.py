"""The kinds of mixers: those of the survey of efficient Transformers (arXiv 2009.06732), and of what came after it."""

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
    "delta rule and learning in the state",
    "state spaces",
    "RWKV",
    "recurrent networks",
    "convolutions",
    "feed-forwards",
    "others",
)


def families(info: Info) -> tuple[str, ...]:
    """The kinds that a mixer belongs to, in the order of :data:`FAMILIES`; it is listed under the first.

    Several where its registration says so, as in the survey's figure 2; else the ``FAMILY`` of the package that its file lies in.
    """
    package = sys.modules.get(info.cls.__module__.rpartition(".")[0])
    return tuple(sorted(info.families, key=FAMILIES.index)) or (getattr(package, "FAMILY", "others"),)
