"""How a sequence becomes (q, k, v, decay, ...) and back: one file per system."""

from linattn.mixers.base import Mixer as Mixer
from linattn.mixers.base import Recurrence as Recurrence
from linattn.mixers.carry import Carry as Carry
from linattn.mixers.decay import gla as _gla  # noqa: F401  (importing registers)
from linattn.mixers.registry import available as available
from linattn.mixers.registry import create as create
from linattn.mixers.registry import info as info
from linattn.mixers.registry import register as register
