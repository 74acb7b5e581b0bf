"""Feed-forwards by name, the token-wise layers of a block. They are registered like mixers, with the kind "feed-forward"."""

from __future__ import annotations

from typing import Any

from linattn.arguments import suggestion
from linattn.ffn.collect import Report as Report
from linattn.ffn.collect import added_counts as added_counts
from linattn.ffn.collect import added_loss as added_loss
from linattn.ffn.collect import report as report
from linattn.ffn.collect import reports as reports
from linattn.ffn.experts import Experts as Experts
from linattn.ffn.geglu import GeGLU as GeGLU
from linattn.ffn.gshard import GShard as GShard
from linattn.ffn.mlp import MLP as MLP
from linattn.ffn.processes import gathered as gathered
from linattn.ffn.processes import spread as spread
from linattn.ffn.product_key_memory import ProductKeyMemory as ProductKeyMemory
from linattn.ffn.st_moe import STMoE as STMoE
from linattn.ffn.swiglu import SwiGLU as SwiGLU
from linattn.ffn.switch import Switch as Switch
from linattn.mixers import Mixer, registry

FAMILY = "feed-forwards"
NONE = "none"  # a block without a feed-forward


def available() -> list[str]:
    """Names that a feed-forward pattern may hold."""
    return [NONE, *(name for name in registry.available() if registry.info(name).kind == "feed-forward")]


def options(name: str) -> list[str]:
    """Options of a feed-forward besides its width."""
    return registry.info(name).options


def create(name: str, dim: int, hidden: int | None = None, **options: Any) -> Mixer | None:
    """Create a feed-forward [.., dim] -> [.., dim] with ``hidden`` inner channels (its own default if None); None for ``"none"``.

    Raises:
        ValueError: for a name that is not in :func:`available`, and for a ``hidden`` that is not a number of channels.
        TypeError: for an option that the feed-forward does not have.
    """
    if isinstance(name, str) and name == NONE:
        return None
    if not isinstance(name, str) or name not in available():
        raise ValueError(f"no feed-forward is called {name!r}{suggestion(name, available())}")
    if hidden is None:  # its own default; a plugin's may lack the option
        return registry.create(name, dim=dim, **options)
    if not isinstance(hidden, int) or isinstance(hidden, bool) or hidden < 1:
        raise ValueError(f"hidden must be an integer of at least 1, but came as {hidden!r}")
    return registry.create(name, dim=dim, hidden=hidden, **options)
