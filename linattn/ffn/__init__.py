"""Feed-forwards by name: what a block does to each token on its own."""

from __future__ import annotations

from torch import nn

from linattn.ffn.swiglu import SwiGLU as SwiGLU

_KINDS: dict[str, type[nn.Module]] = {"swiglu": SwiGLU}
NONE = "none"  # a block without a feed-forward


def available() -> list[str]:
    """Names that a feed-forward pattern may hold."""
    return [NONE, *sorted(_KINDS)]


def create(name: str, dim: int, hidden: int | None = None) -> nn.Module | None:
    """A new feed-forward [.., dim] -> [.., dim] with ``hidden`` inner channels (its own default if None); None for ``"none"``."""
    if name == NONE:
        return None
    if name not in _KINDS:
        raise ValueError(f"no feed-forward is called {name!r}. There are: {', '.join(available())}")
    return _KINDS[name](dim, hidden)
