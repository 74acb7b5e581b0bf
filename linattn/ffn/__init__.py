"""Feed-forwards by name: what a block does to each token on its own."""

from __future__ import annotations

import inspect

from torch import nn

from linattn.ffn.collect import Report as Report
from linattn.ffn.collect import report as report
from linattn.ffn.collect import reports as reports
from linattn.ffn.experts import Experts as Experts
from linattn.ffn.geglu import GeGLU as GeGLU
from linattn.ffn.mlp import MLP as MLP
from linattn.ffn.swiglu import SwiGLU as SwiGLU

_KINDS: dict[str, type[nn.Module]] = {"swiglu": SwiGLU, "geglu": GeGLU, "mlp": MLP, "experts": Experts}
NONE = "none"  # a block without a feed-forward


def available() -> list[str]:
    """Names that a feed-forward pattern may hold."""
    return [NONE, *sorted(_KINDS)]


def options(name: str) -> list[str]:
    """What can be said of a feed-forward beside its width."""
    return [option for option in inspect.signature(_KINDS[name]).parameters if option != "dim"]


def create(name: str, dim: int, hidden: int | None = None, **options) -> nn.Module | None:
    """A new feed-forward [.., dim] -> [.., dim] with ``hidden`` inner channels (its own default if None); None for ``"none"``."""
    if name == NONE:
        return None
    if name not in _KINDS:
        raise ValueError(f"no feed-forward is called {name!r}. There are: {', '.join(available())}")
    return _KINDS[name](dim, hidden, **options)
