"""Prompt lookup: drafts of the next tokens from an earlier occurrence of the last tokens in the same text."""

from __future__ import annotations

from collections.abc import Sequence

SIZES = (10, 6, 4, 3)  # tokens of the n-grams that are indexed, longest first, since a longer match predicts better


class Lookup:
    """Tokens of one sequence with an index of their n-grams; an n-gram maps to its latest occurrence before the end."""

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        self.tokens: list[int] = []
        self._places: dict[tuple[int, ...], int] = {}  # n-gram -> index of the token after it
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append ``tokens``. The n-grams that end in the last token are indexed once a token follows them."""
        known, places = self.tokens, self._places
        for token in tokens:
            end = len(known)
            for size in SIZES:
                if end >= size:
                    places[tuple(known[end - size : end])] = end
            known.append(token)

    def propose(self, count: int) -> list[int]:
        """At most ``count`` tokens that followed the latest earlier occurrence of the last tokens; empty if there is none.

        A draft that reaches the end of the text continues in itself, so that short periods are repeated.
        """
        start = self._match()
        if start is None:
            return []
        known, end = self.tokens, len(self.tokens)
        period = end - start
        return [known[start + i % period] for i in range(count)]

    def _match(self) -> int | None:
        """Index of the token after the latest earlier n-gram that equals the last tokens."""
        for size in SIZES:
            if len(self.tokens) > size and (place := self._places.get(tuple(self.tokens[-size:]))) is not None:
                return place
        return None
