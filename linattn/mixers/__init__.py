"""How a sequence becomes (q, k, v, decay, ...) and back: one file per system."""

from linattn.mixers.attention import softmax as _softmax  # noqa: F401  (importing registers)
from linattn.mixers.base import Mixer as Mixer
from linattn.mixers.base import Recurrence as Recurrence
from linattn.mixers.carry import Carry as Carry
from linattn.mixers.cost import Cost as Cost
from linattn.mixers.cost import cost as cost
from linattn.mixers.decay import gla as _gla  # noqa: F401
from linattn.mixers.decay import mamba2 as _mamba2  # noqa: F401
from linattn.mixers.decay import retnet as _retnet  # noqa: F401
from linattn.mixers.delta import deltanet as _deltanet  # noqa: F401
from linattn.mixers.delta import gated_deltanet as _gated_deltanet  # noqa: F401
from linattn.mixers.inspect import check_forms as check_forms
from linattn.mixers.inspect import mixing_matrix as mixing_matrix
from linattn.mixers.kernel import linear as _linear  # noqa: F401
from linattn.mixers.kernel import linear_transformer as _linear_transformer  # noqa: F401
from linattn.mixers.recurrent import lstm as _lstm  # noqa: F401
from linattn.mixers.registry import available as available
from linattn.mixers.registry import create as create
from linattn.mixers.registry import info as info
from linattn.mixers.registry import register as register
