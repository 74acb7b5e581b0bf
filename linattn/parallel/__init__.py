"""Models and sequences over several processes: context parallelism of every recurrence, and sharded parameters."""

from linattn.parallel.apply import parallelize as parallelize
from linattn.parallel.context import context_parallel as context_parallel
from linattn.parallel.layout import Layout as Layout
from linattn.parallel.loss import next_tokens as next_tokens
from linattn.parallel.loss import token_loss as token_loss
