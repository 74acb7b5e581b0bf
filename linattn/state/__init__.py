"""States of models between calls, in memory and on disk."""

from typing import Any

from linattn.state.checksum import damage as damage
from linattn.state.checksum import digest as digest
from linattn.state.checksum import digest_of_text as digest_of_text
from linattn.state.checksum import save_tensors as save_tensors
from linattn.state.checksum import write_tensors as write_tensors
from linattn.state.files import content_of as content_of
from linattn.state.files import read_json as read_json
from linattn.state.files import replacing as replacing
from linattn.state.files import writable as writable
from linattn.state.lock import empty as empty
from linattn.state.lock import only_writer as only_writer
from linattn.state.state import State as State


def __getattr__(name: str) -> Any:
    if name == "PrefixStore":  # needs filelock, which the rest does without
        from linattn.state.store import PrefixStore

        return PrefixStore
    raise AttributeError(f"module 'linattn.state' has no attribute {name!r}")
