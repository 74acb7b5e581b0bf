"""Mixers: the maps of a sequence to (q, k, v, decay, ...) and back, one file per system."""

from linattn.mixers.base import Mixer as Mixer
from linattn.mixers.base import Recurrence as Recurrence
from linattn.mixers.context import CallContext as CallContext
from linattn.mixers.context import CallContext as Carry  # noqa: F401  the earlier name of CallContext
from linattn.mixers.cost import Cost as Cost
from linattn.mixers.cost import cost as cost
from linattn.mixers.inspect import check_forms as check_forms
from linattn.mixers.inspect import mixing_matrix as mixing_matrix
from linattn.mixers.kinds import CrossMixer as CrossMixer
from linattn.mixers.kinds import FeedForward as FeedForward
from linattn.mixers.kinds import GridMixer as GridMixer
from linattn.mixers.kinds import Resampler as Resampler
from linattn.mixers.kinds import create_bidirectional as create_bidirectional
from linattn.mixers.kinds import over_grid as over_grid
from linattn.mixers.registry import available as available
from linattn.mixers.registry import create as create
from linattn.mixers.registry import info as info
from linattn.mixers.registry import register as register


def __getattr__(name: str) -> type[Mixer]:
    """Class of a registered mixer by its name, such as ``linattn.mixers.GLA``; no mixer is imported for other names."""
    from linattn.arguments import suggestion
    from linattn.mixers.registry import classes

    found = classes() if name[0].isupper() else {}
    if name not in found:
        known = [*found, *(own for own in globals() if not own.startswith("_"))]
        raise AttributeError(f"module 'linattn.mixers' has no attribute {name!r}{suggestion(name, known, ' ')}".rstrip())
    return found[name]


def __dir__() -> list[str]:
    from linattn.mixers.registry import classes

    return sorted({*globals(), *classes()})
