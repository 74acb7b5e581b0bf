"""Copying and induction: the input is repeated, at lengths beyond those of training."""

from __future__ import annotations

import torch
from torch import Generator

from linattn.tasks.examples import IGNORED, Examples, integers, whole


def copying(count: int, *, length: int, vocab_size: int = 28, generator: Generator) -> Examples:
    """A string of ``length`` random letters, then a copy token, after which the string is to be repeated (arXiv 2402.01032, section 2).

    begin x₁ ... x_L copy x₁ ... x_{L-1}: 2 L + 1 tokens with L questions, from the copy token on. Token V - 2 is the beginning, V - 1
    the copy token; with V = 28 there are 26 letters, as in the paper.

    Raises:
        ValueError: for a ``length`` below 1 or a vocabulary of fewer than 3.
    """
    whole(count, least=1, length=length)
    whole(count, least=3, vocab_size=vocab_size)
    letters = integers(0, vocab_size - 2, (count, length), generator)
    begin, copy = (torch.full((count, 1), token) for token in (vocab_size - 2, vocab_size - 1))
    ids = torch.cat([begin, letters, copy, letters[:, :-1]], 1)
    labels = torch.full_like(ids, IGNORED)
    labels[:, length + 1 :] = letters
    return Examples(ids, labels, vocab_size)


def induction_heads(count: int, *, tokens: int, vocab_size: int = 16, generator: Generator) -> Examples:
    """Random tokens, a special one (V - 1) among them and again at the end: its successor is asked (arXiv 2312.00752, 4.1).

    The first place of the special token is uniform over the first T - 2. Any length is possible.

    Returns:
        Examples with ``tokens`` tokens, of which the last asks.

    Raises:
        ValueError: for fewer than 3 tokens or a vocabulary of fewer than 2.
    """
    whole(count, least=3, tokens=tokens)
    whole(count, least=2, vocab_size=vocab_size)
    ids = integers(0, vocab_size - 1, (count, tokens), generator)
    place = integers(0, tokens - 2, (count, 1), generator)
    ids.scatter_(1, place, vocab_size - 1)
    ids[:, -1] = vocab_size - 1
    labels = torch.full_like(ids, IGNORED)
    labels[:, -1:] = ids.gather(1, place + 1)
    return Examples(ids, labels, vocab_size)
