"""Models and sequences over several processes: context parallelism of every recurrence."""

from linattn.parallel.context import context_parallel as context_parallel
from linattn.parallel.layout import Layout as Layout
