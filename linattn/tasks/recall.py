"""Multi-query associative recall: pairs of keys and values, then the keys again, at power-law distances (arXiv 2312.04927)."""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from linattn.tasks.examples import IGNORED, Examples, distinct, integers, weighted, whole

_POWER = 0.01  # a: the gap before a query has a probability in proportion to gap^(a - 1)


def multi_query_recall(count: int, *, tokens: int = 64, pairs: int = 8, vocab_size: int = 8192, generator: Generator) -> Examples:
    """MQAR as in the code of Zoology (arXiv 2312.04927): k₁ v₁ ... k_n v_n, then each key once more, where its value is asked.

    Keys are different tokens from 1 to V/2 - 1, values different ones from V/2 to V - 1. After the pairs every even place may hold a
    query; n of these places are drawn, place g = 1, 2, ... with the weight g^-0.99. All other places hold random tokens.

    Args:
        count: N, examples.
        tokens: T, even, at least 4 x pairs.
        pairs: n; below V/2.
        vocab_size: V, even.
        generator: of all draws.

    Returns:
        Examples with T tokens and n questions, each at the place of its query.

    Raises:
        ValueError: for numbers that do not fit together.
    """
    return _recall(count, tokens, pairs, 0, vocab_size, generator)


def forgetting_recall(
    count: int, *, tokens: int = 64, pairs: int = 8, updates: int = 4, vocab_size: int = 8192, generator: Generator
) -> Examples:
    """MQAR in which ``updates`` of the keys get a new value after all pairs; a key's last value is asked.

    As in the code of Zoology (arXiv 2312.04927), with one difference: there the new value differs from the old value of any one key,
    here from that of its own key.

    Args:
        count, pairs, vocab_size, generator: as in :func:`multi_query_recall`.
        tokens: T, even, at least 4 x pairs + 2 x updates.
        updates: at most ``pairs``.

    Returns:
        Examples with T tokens and n questions, each at the place of its query.

    Raises:
        ValueError: for numbers that do not fit together.
    """
    return _recall(count, tokens, pairs, updates, vocab_size, generator)


def _recall(count: int, tokens: int, pairs: int, updates: int, vocab_size: int, generator: Generator) -> Examples:
    _check(count, tokens, pairs, updates, vocab_size)
    half, context = vocab_size // 2, 2 * (pairs + updates)
    keys = 1 + distinct(count, pairs, half - 1, generator)
    values = half + distinct(count, pairs, half, generator)
    written = torch.stack([keys, values], -1).flatten(1)
    if updates:
        which = distinct(count, updates, pairs, generator)
        new = half + (values.gather(1, which) - half + integers(1, half, (count, updates), generator)) % half  # any other value
        written = torch.cat([written, torch.stack([keys.gather(1, which), new], -1).flatten(1)], 1)
        values = values.scatter(1, which, new)
    places = context + 2 * weighted(count, pairs, _weights((tokens - context) // 2), generator)
    ids = integers(0, vocab_size, (count, tokens), generator)
    ids[:, :context] = written
    labels = torch.full_like(ids, IGNORED).scatter_(1, places, values)
    return Examples(ids.scatter_(1, places, keys), labels, vocab_size)


def _weights(places: int) -> Tensor:
    return torch.arange(1, places + 1, dtype=torch.float64) ** (_POWER - 1)


def _check(count: int, tokens: int, pairs: int, updates: int, vocab_size: int) -> None:
    whole(count, tokens=tokens, updates=updates, vocab_size=vocab_size)
    whole(count, least=1, pairs=pairs)
    least = 4 * pairs + 2 * updates
    if tokens % 2 or tokens < least:
        raise ValueError(f"tokens must be even and at least {least} for {pairs} pairs and {updates} updates, but came as {tokens}")
    if vocab_size % 2 or vocab_size <= 2 * pairs:
        raise ValueError(f"vocab_size must be even and above {2 * pairs}, twice the pairs, but came as {vocab_size}")
    if updates > pairs:
        raise ValueError(f"updates must be at most the {pairs} pairs, but came as {updates}")
