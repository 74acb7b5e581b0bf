"""Length of drafts, from the measured costs of steps and verifications and from the share of accepted drafts."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

LENGTHS = (3, 7, 15, 31)  # tokens of a draft
SHARE = 0.02  # largest share of the time that drafts without a gain may cost
GRACE = 4.0  # steps that drafts may cost at the start
SAVED = 16.0  # largest balance, in steps, that later losses may use up
WORTH = 1.1  # minimum expected gain of a draft; a fourth of it for short trial drafts


@dataclass
class Share:
    """Counts of one row: accepted tokens, and drafts that ended in a rejected one; older ones count less."""

    right: float = 4.0
    wrong: float = 1.0

    def note(self, drafted: int, accepted: int) -> None:
        """Record a draft."""
        if drafted:
            self.right, self.wrong = 0.8 * self.right + accepted, 0.8 * self.wrong + (accepted < drafted)

    def expected(self, drafted: int) -> float:
        """Expected number of new tokens from a draft of ``drafted`` tokens."""
        p = self.right / (self.right + self.wrong)
        return (1 - p ** (drafted + 1)) / (1 - p) if p < 1 else drafted + 1.0


class Pace:
    """Decides between a step of one token and the verification of drafts.

    All times are in seconds. The balance is the time that verification has saved so far; losses are limited to a small share of the
    time, so that unpredictable text costs next to nothing.
    """

    def __init__(self) -> None:
        self._step: float | None = None  # seconds of a step
        self._calls: dict[int, float] = {}  # seconds of a call, by its tokens rounded up to a power of two
        self._least = 0.0  # lower bound of a call's seconds, until one is measured
        self._balance = self._elapsed = 0.0

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Record the time of a step."""
        start = time.perf_counter()
        yield
        seconds = time.perf_counter() - start
        self._step = _smaller(self._step, seconds)
        self._elapsed += seconds

    def expect(self, seconds: float) -> None:
        """Set the lower bound of a call's time until one is measured."""
        self._least = seconds

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Record the time of one token by the uncaptured model, which verification runs: possibly many times that of a captured step."""
        start = time.perf_counter()
        yield
        self._least = time.perf_counter() - start

    @contextmanager
    def losing(self) -> Iterator[None]:
        """Record time lost against plain decoding."""
        start = time.perf_counter()
        yield
        self._balance -= time.perf_counter() - start

    def verified(self, seconds: float, drafted: Sequence[int], accepted: Sequence[int], shares: Sequence[Share]) -> None:
        """Record a verification of ``seconds`` that accepted so many of the ``drafted`` tokens of each row."""
        size = _bucket(len(drafted) + sum(drafted))
        self._calls[size] = _smaller(self._calls.get(size), seconds)
        for share, count, good in zip(shares, drafted, accepted, strict=True):
            share.note(count, good)
        step = self._step or seconds
        gain = (1 + sum(accepted) / len(accepted)) * step - seconds
        self._balance = min(self._balance + gain, SAVED * step)
        self._elapsed += seconds

    def length(self, available: Sequence[int], shares: Sequence[Share]) -> int:
        """Number of tokens to draft, from the available tokens and the share of each row; 0 if a step is better."""
        trial = self.least(len(available))
        if self._step is None or not any(available) or not trial:
            return 0
        if self._balance < -(SHARE * self._elapsed + GRACE * self._step):
            return 0
        best, gain = 0, 0.0
        for length in LENGTHS:
            drafts = [min(length, n) for n in available]
            expected = sum(share.expected(n) for share, n in zip(shares, drafts, strict=True)) / len(drafts)
            now = expected * self._step / self._cost(len(drafts) + sum(drafts))
            if now > gain:
                best, gain = length, now
        explores = self._balance > -SHARE * self._elapsed
        return best if gain > WORTH else trial if explores and gain > WORTH / 4 else 0

    def least(self, rows: int) -> int:
        """Shortest draft of each of ``rows`` rows that gains time if accepted whole; 0 if there is none."""
        step = self._step
        if step is None:
            return 0
        return next((n for n in LENGTHS if (n + 1) * step > WORTH * self._cost(rows * (n + 1))), 0)

    def _cost(self, tokens: int) -> float:
        """Seconds of a call on ``tokens``: measured, else from the nearest measured size, else estimated."""
        assert self._step is not None
        size = _bucket(tokens)
        if size in self._calls:
            return self._calls[size]
        if not self._calls:
            return max(self._step * (2 + 0.1 * size), self._least)
        nearest = min(self._calls, key=lambda known: abs(known.bit_length() - size.bit_length()))
        return self._calls[nearest] * (1 + 0.2 * (size / nearest - 1)) if size > nearest else self._calls[nearest]


def _bucket(tokens: int) -> int:
    return 1 << (tokens - 1).bit_length()


def _smaller(old: float | None, new: float) -> float:
    """Running mean that falls at once and rises slowly, because first calls and calls on a busy machine take longer."""
    return new if old is None else min(new, 0.8 * old + 0.2 * new)
