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
