"""What a model remembers between calls, in memory and on disk."""

from linattn.state.files import replacing as replacing
from linattn.state.state import State as State
