"""Tasks of Mechanistic Architecture Design (arXiv 2403.17844): recall in three kinds, selective copying, compression, memorisation.

Labels are only at answers determined by earlier tokens. The authors' code tests the same, but trains recall on every next token.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Generator, Tensor

from linattn.tasks.examples import IGNORED, Examples, distinct, integers, whole


def in_context_recall(
    count: int, *, tokens: int = 128, vocab_size: int = 16, noise: float = 0.0, noise_vocab: int = 0, generator: Generator
) -> Examples:
    """Pairs of a key and its value with repeated keys: the value of every repeated key is asked (arXiv 2403.17844).

    Each example draws its own values of the keys. The last key is the key of an earlier pair, each pair equally likely (in the authors'
    code each key is). With probability ``noise`` each pair but the last and one other is replaced by two tokens of a noise vocabulary
    (the paper's noisy recall: vocabulary 32, 16 of these for noise, noise 0.2).

    Args:
        count: N.
        tokens: even; the examples have one less, because the last value is left out.
        vocab_size: V: keys, values and noise tokens, in that order.
        noise: probability from 0 to below 1.
        noise_vocab: number of noise tokens; at least 1 with noise.
        generator: for all draws.

    Returns:
        Examples with ``tokens`` - 1 tokens; a question is at the place of its key.

    Raises:
        ValueError: for numbers that do not fit together.
    """
    whole(count, least=4, tokens=tokens)
    _check_noise(noise, noise_vocab)
    whole(count, least=noise_vocab + 2, vocab_size=vocab_size)
    _check_even(tokens)
    known = vocab_size - noise_vocab
    slots, half = tokens // 2, known // 2
    key = integers(0, half, (count, slots), generator)
    clear = torch.rand(count, slots - 1, generator=generator, dtype=torch.float64) >= noise
    clear.scatter_(1, integers(0, slots - 1, (count, 1), generator), True)
    clear = torch.cat([clear, torch.ones(count, 1, dtype=torch.bool)], 1)
    key[:, -1] = key.gather(1, _one_of(clear[:, :-1], generator))[:, 0]
    value = integers(half, known, (count, half), generator).gather(1, key)
    pairs = torch.stack([key, value], -1)
    if noise:
        pairs = torch.where(clear[..., None], pairs, integers(known, vocab_size, tuple(pairs.shape), generator))
    again = _first(torch.where(clear, key, half + torch.arange(slots))) < torch.arange(slots)  # noise is not a key
    asked = torch.where(clear & again, value, IGNORED)
    labels = torch.stack([asked, torch.full_like(asked, IGNORED)], -1)
    return Examples(pairs.flatten(1)[:, :-1], labels.flatten(1)[:, :-1], vocab_size)


def fuzzy_recall(
    count: int,
    *,
    tokens: int = 128,
    vocab_size: int = 16,
    key_sizes: Sequence[int] = (1, 2, 3),
    value_size: int = 3,
    generator: Generator,
) -> Examples:
    """In-context recall of keys and values that are several tokens long (arXiv 2403.17844).

    A key has one of ``key_sizes``, a value 1 to ``value_size`` different tokens. Every token of the value of a repeated key is asked,
    one place before it. Padding (token V - 1) in front fills up the length. The paper trains with keys of 1 to 3 tokens and tests
    with keys of 3.

    Returns:
        Examples with ``tokens`` tokens.

    Raises:
        ValueError: for numbers that do not fit together.
    """
    whole(count, least=1, tokens=tokens, value_size=value_size)
    whole(count, least=3, vocab_size=vocab_size)
    if not isinstance(key_sizes, Sequence) or not key_sizes or not all(type(size) is int for size in key_sizes):
        raise ValueError(f"key_sizes must be integers, at least one, but came as {key_sizes!r}")
    half = (vocab_size - 1) // 2
    longest = max(key_sizes) + value_size
    if min(key_sizes) < 1 or max(*key_sizes, value_size) > half or tokens < 3 * longest:
        raise ValueError(
            f"keys and values must have 1 to {half} tokens, half of vocab_size - 1, and tokens at least 3 pairs, but came as "
            f"key_sizes {key_sizes}, value_size {value_size}, tokens {tokens}"
        )
    slots = tokens // (min(key_sizes) + 1) + 2
    key = _motifs(0, half, key_sizes, (count, slots), generator)
    value = _motifs(half, vocab_size - 1, range(1, value_size + 1), (count, slots), generator)
    first = _first(_named(key, half))
    value = _rows(value, first)  # a key keeps the value of its first occurrence
    length = (key >= 0).sum(-1) + (value >= 0).sum(-1)
    kept = length.cumsum(1) - length < tokens - 2 * longest  # pairs that leave space for the last one
    probe = _one_of(kept, generator)
    key, value = (torch.cat([motifs, _rows(motifs, probe)], 1) for motifs in (key, value))
    kept, again = (torch.cat([t, torch.ones_like(probe, dtype=torch.bool)], 1) for t in (kept, first < torch.arange(slots)))
    written = torch.where(kept[..., None], torch.cat([key, value], -1), -1).flatten(1)  # -1 where a motif is shorter
    asked = torch.cat([torch.full_like(key, IGNORED), torch.where(again[..., None] & (value >= 0), value, IGNORED)], -1)
    order = torch.argsort((written >= 0).long(), dim=1, stable=True)[:, -tokens - 1 :]  # tokens in their order, padding before them
    ids, labels = written.gather(1, order), asked.flatten(1).gather(1, order)
    ids, labels = torch.where(ids >= 0, ids, vocab_size - 1), torch.where(ids >= 0, labels, IGNORED)
    return Examples(ids[:, :-1], labels[:, 1:], vocab_size)


def selective_copying(count: int, *, tokens: int = 256, content: int = 16, vocab_size: int = 16, generator: Generator) -> Examples:
    """``content`` tokens at random places among blanks; after a copy token they are asked in their order (arXiv 2312.00752, 4.1).

    All arrangements are equally likely; in MAD's code no blank comes behind the last token. Token V - 2 is the blank, V - 1 the copy token.

    Returns:
        Examples with ``tokens`` tokens, of which the last ``content`` ask.

    Raises:
        ValueError: for numbers that do not fit together.
    """
    whole(count, least=1, content=content)
    whole(count, least=2 * content + 1, tokens=tokens)
    whole(count, least=3, vocab_size=vocab_size)
    wanted = integers(0, vocab_size - 2, (count, content), generator)
    places = distinct(count, content, tokens - content - 1, generator).sort(1).values
    ids = torch.full((count, tokens), vocab_size - 2).scatter_(1, places, wanted)
    ids[:, tokens - content - 1] = vocab_size - 1
    labels = torch.full_like(ids, IGNORED)
    labels[:, tokens - content :] = wanted
    return Examples(ids, labels, vocab_size)


def compression(count: int, *, tokens: int = 32, vocab_size: int = 16, generator: Generator) -> Examples:
    """Random tokens and, last, a compression token (V - 1), from whose output alone all tokens must be read (arXiv 2403.17844).

    The labels are the tokens themselves. A model for this task reads its last output only, together with the place that is asked:
    :class:`linattn.reproduce.synthetic.Decoder`.

    Returns:
        Examples with ``tokens`` tokens, of which all but the last are asked.

    Raises:
        ValueError: for fewer than 2 tokens or a vocabulary of fewer than 2.
    """
    whole(count, least=2, tokens=tokens, vocab_size=vocab_size)
    ids = integers(0, vocab_size - 1, (count, tokens), generator)
    ids[:, -1] = vocab_size - 1
    labels = ids.clone()
    labels[:, -1] = IGNORED
    return Examples(ids, labels, vocab_size)


def memorisation(count: int, *, tokens: int = 32, vocab_size: int = 256, facts: int = 0, generator: Generator) -> Examples:
    """Keys, each followed by a token (V - 1), at which the key's value is asked; values are never shown (arXiv 2403.17844).

    The map from keys (the lower half of the other tokens) to values (the upper half) is one permutation for all examples, drawn with the
    seed ``facts``, which the model has to learn.

    Returns:
        Examples with ``tokens`` tokens, of which every other one asks.

    Raises:
        ValueError: for numbers that do not fit together.
    """
    whole(count, least=2, tokens=tokens)
    whole(count, least=3, vocab_size=vocab_size)
    whole(count, facts=facts)
    _check_even(tokens)
    half = (vocab_size - 1) // 2
    value_of = half + torch.randperm(half, generator=torch.Generator().manual_seed(facts))
    key = integers(0, half, (count, tokens // 2), generator)
    ids = torch.stack([key, torch.full_like(key, vocab_size - 1)], -1).flatten(1)
    labels = torch.stack([torch.full_like(key, IGNORED), value_of[key]], -1).flatten(1)
    return Examples(ids, labels, vocab_size)


def _check_noise(noise: float, noise_vocab: int) -> None:
    whole(0, noise_vocab=noise_vocab)
    if not isinstance(noise, int | float) or not 0 <= noise < 1 or (noise and not noise_vocab):
        raise ValueError(
            f"noise must be from 0 to below 1, with a noise_vocab of at least 1 if it is above 0, but came as {noise!r} with {noise_vocab}"
        )


def _check_even(tokens: int) -> None:
    if tokens % 2:
        raise ValueError(f"tokens must be even, but came as {tokens}")


def _first(key: Tensor) -> Tensor:
    """Index of the first occurrence of each key of [N, n]: [N, n]."""
    order = key.argsort(dim=1, stable=True)
    ordered = key.gather(1, order)
    new = torch.cat([torch.ones_like(order[:, :1], dtype=torch.bool), ordered[:, 1:] != ordered[:, :-1]], 1)
    begin = torch.where(new, torch.arange(key.shape[1]), 0).cummax(1).values
    return torch.empty_like(order).scatter_(1, order, order.gather(1, begin))


def _one_of(real: Tensor, generator: Generator) -> Tensor:
    """Index of a true value of ``real`` [N, n] in each row, each equally likely: [N, 1]."""
    chance = torch.rand(real.shape, generator=generator, dtype=torch.float64)
    return torch.where(real, chance, -1.0).argmax(1, keepdim=True)


def _motifs(low: int, high: int, sizes: Sequence[int], shape: tuple[int, int], generator: Generator) -> Tensor:
    """Draw different tokens from low to high - 1, each of ``sizes`` equally likely: [*shape, longest] with -1 behind the end."""
    longest, count = max(sizes), shape[0] * shape[1]
    size = torch.tensor(sizes)[integers(0, len(sizes), (count, 1), generator)]
    drawn = low + distinct(count, longest, high - low, generator)  # prefixes of these are equally distributed
    return torch.where(torch.arange(longest) < size, drawn, -1).view(*shape, longest)


def _named(motifs: Tensor, tokens: int) -> Tensor:
    """Number of each of ``motifs`` [N, n, longest] of tokens below ``tokens``, equal for equal motifs: [N, n]."""
    name = torch.zeros_like(motifs[..., 0])
    for token in motifs.unbind(-1):
        name = torch.unique(name * (tokens + 1) + token + 1, return_inverse=True)[1]
    return name


def _rows(motifs: Tensor, places: Tensor) -> Tensor:
    """Gather ``motifs`` [N, n, longest] at ``places`` [N, m]: [N, m, longest]."""
    return motifs.gather(1, places[..., None].expand(-1, -1, motifs.shape[-1]))
