"""Streaming text: stop texts, and removal of characters that are unsafe in a terminal."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator, Sequence

from linattn.arguments import described
from linattn.data.codec import Stream


def stream_text(tokens: Iterable[int], decoder: Stream, stop: Sequence[str] = ()) -> Iterator[str]:
    """Decode ``tokens`` as they arrive; end before the first text of ``stop``.

    Text that may begin a stop text is held back.
    """
    if not isinstance(tokens, Iterable):
        raise TypeError(f"tokens must be integers one after the other, but came as {described(tokens)}")
    if not hasattr(decoder, "push"):
        raise TypeError(f"decoder must be the stream() of a codec, but came as {described(decoder)}")
    if not isinstance(stop, (list, tuple)) or not all(isinstance(s, str) for s in stop):
        raise TypeError(f"stop must be a list of strings, but came as {described(stop)}")
    held = ""
    for piece in _pieces(tokens, decoder):
        held += piece
        ends = [at for s in stop if (at := held.find(s)) >= 0]
        if ends:
            yield held[: min(ends)]
            return
        sure = len(held) - max((_overlap(held, s) for s in stop), default=0)
        if sure:
            yield held[:sure]
            held = held[sure:]
    if held:
        yield held


def printable(text: str) -> str:
    """Remove control codes and direction overrides from ``text``; line ends and tabs stay."""
    return "".join(c for c in text if c in "\n\t" or not (unicodedata.category(c) == "Cc" or c in _DIRECTIONS))


_DIRECTIONS = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def _pieces(tokens: Iterable[int], decoder: Stream) -> Iterator[str]:
    for token in tokens:
        if piece := decoder.push(token):
            yield piece
    if piece := decoder.end():
        yield piece


def _overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of ``text`` that is a prefix of ``stop``."""
    return next((n for n in range(min(len(text), len(stop)), 0, -1) if text.endswith(stop[:n])), 0)
