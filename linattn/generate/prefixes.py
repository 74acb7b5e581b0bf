"""Cache of prefix states in memory: a chain of hashes over blocks of tokens leads to the state after each block."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence

from linattn.state import State


class PrefixCache:
    """States of one row by the tokens read, together at most ``max_bytes``; the least recently used are dropped first."""

    def __init__(self, max_bytes: int, block: int) -> None:
        self.max_bytes, self.block, self.nbytes = max_bytes, block, 0
        self._states: OrderedDict[bytes, State] = OrderedDict()

    def keys(self, tokens: Sequence[int], salt: str) -> list[bytes]:
        """Hash of ``salt`` and the tokens of the first 1, 2, ... whole blocks; without the block that holds the last token.

        The last token is always read, since states do not hold logits.
        """
        if not self.max_bytes:
            return []
        content, keys, digest = array("q", tokens), [], hashlib.sha256(salt.encode()).digest()
        for start in range(0, len(content) - self.block, self.block):
            digest = hashlib.sha256(digest + content[start : start + self.block].tobytes()).digest()
            keys.append(digest)
        return keys

    def find(self, keys: Sequence[bytes], read: int = 0) -> tuple[int, State | None]:
        """Return the number of tokens of the longest cached prefix with more than ``read`` blocks, and its state; (0, None) if none."""
        for n in range(len(keys), read, -1):
            if (state := self._states.get(keys[n - 1])) is not None:
                self._states.move_to_end(keys[n - 1])
                return n * self.block, state
        return 0, None

    def put(self, key: bytes, state: State) -> None:
        """Keep ``state``, which must not be written to, under ``key``; a state larger than ``max_bytes`` is not kept."""
        if key in self._states:
            self._states.move_to_end(key)
        elif state.nbytes <= self.max_bytes:
            self._states[key] = state
            self.nbytes += state.nbytes
            while self.nbytes > self.max_bytes:
                self.nbytes -= self._states.popitem(last=False)[1].nbytes

    def clear(self) -> None:
        """Drop all states."""
        self._states.clear()
        self.nbytes = 0
