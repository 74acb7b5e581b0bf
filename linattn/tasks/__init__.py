"""Synthetic tasks for sequence models: recall, copying, state tracking.

Every function takes the number of examples and a ``generator``, and returns :class:`Examples`; the same seed gives the same
examples on every machine.
"""

from linattn.tasks.copying import copying as copying
from linattn.tasks.copying import induction_heads as induction_heads
from linattn.tasks.examples import IGNORED as IGNORED
from linattn.tasks.examples import Examples as Examples
from linattn.tasks.mad import compression as compression
from linattn.tasks.mad import fuzzy_recall as fuzzy_recall
from linattn.tasks.mad import in_context_recall as in_context_recall
from linattn.tasks.mad import memorisation as memorisation
from linattn.tasks.mad import selective_copying as selective_copying
from linattn.tasks.recall import forgetting_recall as forgetting_recall
from linattn.tasks.recall import multi_query_recall as multi_query_recall
from linattn.tasks.tracking import GROUPS as GROUPS
from linattn.tasks.tracking import parity as parity
from linattn.tasks.tracking import word_problem as word_problem
