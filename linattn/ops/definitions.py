"""Pattern of sentences followed by definitions (arXiv 2408.09075): a definition interacts only with its word."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from linattn.ops.pattern import Part, Pattern


@dataclass(frozen=True)
class Definitions(Pattern):
    """See :func:`definitions`."""

    sentence: int
    spans: tuple[tuple[int, int, int, int], ...]

    def sees(self, query: Tensor, key: Tensor, length: Tensor | int) -> Tensor:
        seen = (query < self.sentence) & (key < self.sentence)
        for first, last, start, stop in self.spans:
            asks, asked = ((t >= start) & (t < stop) for t in (query, key))
            word, of_word = ((t >= first) & (t < last) for t in (query, key))
            seen = seen | (asks & (asked | of_word)) | (word & asked)
        return seen

    def parts(self, length: int, device: torch.device | None = None) -> list[Part]:
        token = torch.arange(length, device=device)[None]
        return [Part(token, token, self)]


def definitions(sentence: int, spans: Iterable[tuple[int, int, int, int]]) -> Pattern:
    """Build the pattern: the first ``sentence`` tokens see each other; a definition sees itself and its word, and only these see it.

    Args:
        sentence: number of tokens of the sentence, which precedes the definitions.
        spans: for each definition (first, last, start, stop): the word is the tokens from first to before last, its definition those
            from start to before stop.

    Raises:
        ValueError: for a word outside of the sentence, and for definitions inside of it or overlapping.
    """
    known, end = tuple(spans), sentence
    for first, last, start, stop in sorted(known, key=lambda span: span[2]):
        if not 0 <= first < last <= sentence:
            raise ValueError(f"spans must have words inside the {sentence} tokens of the sentence, but came with {first} to {last}")
        if not end <= start < stop:
            raise ValueError(f"spans must have definitions in order without overlap, here from {end} on, but came with {start} to {stop}")
        end = stop
    return Definitions(sentence, known)
