"""Sequence that a pool continues: its sampling, its tokens so far, and the conditions that end it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch

from linattn.arguments import described
from linattn.data.codec import Codec
from linattn.generate.packing import Packed
from linattn.generate.sampling import Sampling
from linattn.state import State


@dataclass(frozen=True)
class Stops:
    """Conditions that end a sequence: a token of ``ids``, or a text of ``texts`` in what ``codec`` decodes."""

    ids: frozenset[int] = frozenset()
    texts: tuple[str, ...] = ()
    codec: Codec | None = None

    @classmethod
    def of(cls, stop: Collection[int | str], codec: Codec | None) -> Stops:
        """Sort ``stop`` into tokens and texts.

        Raises:
            TypeError: for anything but integers and strings.
            ValueError: for an empty text, and for texts without a codec.
        """
        given: object = stop
        if isinstance(given, str) or not isinstance(given, Collection) or not all(_is_stop(s) for s in given):
            raise TypeError(f"stop must be a list of tokens, integers, and of texts, but came as {described(stop)}")
        texts = tuple(s for s in stop if isinstance(s, str))
        if texts and codec is None:
            raise ValueError(f"stop has texts, {texts[0]!r} for one, and the pool has no codec to decode tokens: Pool(..., codec=...)")
        if "" in texts:
            raise ValueError("stop must hold texts of at least one character, but one is empty")
        return cls(frozenset(s for s in stop if isinstance(s, int)), texts, codec)


def _is_stop(s: object) -> bool:
    return isinstance(s, (int, str)) and not isinstance(s, bool)


@dataclass(eq=False)
class Request:
    """Sequence that a :class:`Pool` continues, as ``submit`` and ``fork`` return it.

    Args:
        ids: the prompt.
        max_new_tokens: tokens to add at most.
        sampling: how tokens are drawn.
        stops: other conditions that end the sequence.
        generator: for the random numbers of this sequence, on the model's device.
        tokens: tokens added so far; a stop token is the last of them.
        reason: why the sequence has ended: "length", "stop" or "cancelled"; None before that.
    """

    ids: tuple[int, ...]
    max_new_tokens: int
    sampling: Sampling
    stops: Stops
    generator: torch.Generator
    tokens: list[int] = field(default_factory=list)
    reason: str | None = None
    _text: str = field(default="", init=False)

    def __post_init__(self) -> None:
        self._decoder = None if self.stops.codec is None else self.stops.codec.stream()

    @property
    def done(self) -> bool:
        """True if the sequence has ended."""
        return self.reason is not None

    @property
    def text(self) -> str:
        """Decoded text of ``tokens`` up to the stop text.

        Raises:
            ValueError: if the pool has no codec.
        """
        if self._decoder is None:
            raise ValueError("text needs a codec: Pool(..., codec=...)")
        return self._text

    def accept(self, token: int) -> None:
        """Add ``token``, and set ``reason`` if the sequence ends with it."""
        self.tokens.append(token)
        if self._decoder is not None or len(self.tokens) >= self.max_new_tokens or token in self.stops.ids:
            self._end(token)

    def _end(self, token: int) -> None:
        """Set ``reason`` if the sequence ends with its last token, ``token``."""
        stopped = token in self.stops.ids
        ended = "stop" if stopped else "length" if len(self.tokens) >= self.max_new_tokens else None
        if self._decoder is not None:
            piece = "" if stopped else self._decoder.push(token)
            if self._cut(piece if ended is None else piece + self._decoder.end()):
                ended = "stop"
        self.reason = ended

    def twin(self, generator: torch.Generator) -> Request:
        """Copy with the same tokens so far and a ``generator`` of its own."""
        copy = Request(self.ids, self.max_new_tokens, self.sampling, self.stops, generator)
        for token in self.tokens:
            copy.accept(token)
        return copy

    def _cut(self, piece: str) -> bool:
        """Append ``piece`` to the text and cut it at the first stop text, which may begin before ``piece``; True if there is one."""
        start = max(0, len(self._text) - max((len(s) for s in self.stops.texts), default=0))
        self._text += piece
        ends = [at for s in self.stops.texts if (at := self._text.find(s, start)) >= 0]
        self._text = self._text[: min(ends)] if ends else self._text
        return bool(ends)


@dataclass(eq=False)
class Prompt:
    """Tokens that are read once for all ``requests`` that continue them.

    Args:
        requests: sequences that continue the prompt; more may be added while it is read.
        ids: the tokens.
        state: state of one row after ``done`` of these tokens and any tokens before.
        keys: hashes of the prefixes that a cache may hold.
    """

    requests: list[Request]
    ids: Sequence[int]
    state: State | Packed
    keys: list[bytes]
    done: int = 0
