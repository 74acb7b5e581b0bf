"""The tasks of Mechanistic Architecture Design (arXiv 2403.17844): recall in three kinds, selective copying, compression, memorisation.

What is asked is what can be known. The authors' code asks the same in its tests, but trains recall on every next token.
"""

from __future__ import annotations

from itertools import permutations

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from linattn.tasks.examples import IGNORED, Examples, distinct, integers, whole


def in_context_recall(
    count: int, *, tokens: int = 128, vocab_size: int = 16, noise: float = 0.0, noise_vocab: int = 0, generator: Generator
) -> Examples:
    """Pairs of a key and its value, keys coming again: whenever a key was seen before its value is asked.

    Each example has a value of its own for each key. The last key is one of those seen before. With ``noise`` each pair but one is,
    with that probability, two tokens of a noise vocabulary in its place (noisy recall: vocabulary 32, of it noise 16, noise 0.2).

    Args:
        count: N.
        tokens: even; the examples have one less, since the last value is not given away.
        vocab_size: V: keys, values and noise tokens, in that order.
        noise: probability from 0 to below 1.
        noise_vocab: number of noise tokens; at least 1 with noise.
        generator: of all draws.
    """
    whole(count, least=4, tokens=tokens)
    _check_noise(noise, noise_vocab)
    known = vocab_size - noise_vocab
    if tokens % 2 or known < 2:
        raise ValueError(
            f"tokens must be even and vocab_size at least 2 above noise_vocab, but came as {tokens}, {vocab_size}, {noise_vocab}"
        )
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
    asked = torch.where(clear & _seen_before(key, clear), value, IGNORED)
    labels = torch.stack([asked, torch.full_like(asked, IGNORED)], -1)
    return Examples(pairs.flatten(1)[:, :-1], labels.flatten(1)[:, :-1], vocab_size)


def fuzzy_recall(
    count: int,
    *,
    tokens: int = 128,
    vocab_size: int = 16,
    key_sizes: tuple[int, ...] = (1, 2, 3),
    value_size: int = 3,
    generator: Generator,
) -> Examples:
    """The same where keys and values are several tokens long: a key one of ``key_sizes``, a value 1 to ``value_size`` different tokens.

    Every token of the value of a key that was seen before is asked. In front stands padding (token V - 1) up to the full length. The
    paper trains with keys of 1 to 3 tokens and tests with those of 3.
    """
    whole(count, least=1, tokens=tokens, value_size=value_size)
    half = (vocab_size - 1) // 2
    longest = max(key_sizes) + value_size
    if min(key_sizes) < 1 or max(*key_sizes, value_size) > half or tokens < 3 * longest:
        raise ValueError(
            f"keys and values must have 1 to {half} tokens, half of vocab_size - 1, and tokens at least 3 pairs, but came as "
            f"key_sizes {key_sizes}, value_size {value_size}, tokens {tokens}"
        )
    keys, key_size = _motifs(0, half, key_sizes)
    values, value_sizes = _motifs(half, vocab_size - 1, tuple(range(1, value_size + 1)))
    slots = tokens // (min(key_sizes) + 1) + 2
    key = _by_size(key_size, (count, slots), generator)
    value_of = _by_size(value_sizes, (count, len(keys)), generator)
    length = key_size[key] + value_sizes[value_of.gather(1, key)]
    kept = length.cumsum(1) - length < tokens - 2 * longest  # the last pair has room behind those that begin before this
    probe = key.gather(1, _one_of(kept, generator))
    key, kept = torch.cat([key, probe], 1), torch.cat([kept, torch.ones_like(probe, dtype=torch.bool)], 1)
    value = value_of.gather(1, key)
    written = torch.cat([keys[key], values[value]], -1)  # [N, slots, longest], -1 where a motif is shorter
    asked = torch.cat([torch.full_like(keys[key], IGNORED), values[value]], -1)
    asked = torch.where(_seen_before(key, kept)[..., None] & (asked >= 0), asked, IGNORED)
    written = torch.where(kept[..., None], written, -1).flatten(1)
    order = torch.argsort((written >= 0).long(), dim=1, stable=True)[:, -tokens - 1 :]  # what is written to the end, in its order
    ids, labels = written.gather(1, order), asked.flatten(1).gather(1, order)
    ids, labels = torch.where(ids >= 0, ids, vocab_size - 1), torch.where(ids >= 0, labels, IGNORED)
    return Examples(ids[:, :-1], labels[:, 1:], vocab_size)


def selective_copying(count: int, *, tokens: int = 256, content: int = 16, vocab_size: int = 16, generator: Generator) -> Examples:
    """``content`` tokens stand anywhere between blanks; behind a copy token they are asked, in their order (arXiv 2312.00752, 4.1).

    All arrangements are equally likely. Token V - 2 is the blank, V - 1 the copy token.
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
    """Random tokens and, last, a compression token (V - 1), from whose output alone each of them is to be told.

    So the labels are the tokens themselves, and a model for this task must look at its last output only, with the place asked for beside
    it: :class:`linattn.reproduce.fit.Decoder`.
    """
    whole(count, least=2, tokens=tokens, vocab_size=vocab_size)
    ids = integers(0, vocab_size - 1, (count, tokens), generator)
    ids[:, -1] = vocab_size - 1
    labels = ids.clone()
    labels[:, -1] = IGNORED
    return Examples(ids, labels, vocab_size)


def memorisation(count: int, *, tokens: int = 32, vocab_size: int = 256, facts: int = 0, generator: Generator) -> Examples:
    """Keys, each followed by a token (V - 1) in whose place its value is asked; which value a key has is nowhere to be read.

    The map from keys (the lower half of the other tokens) to values (the upper half) is one permutation for all examples, drawn with the
    seed ``facts``: it has to be learned.
    """
    whole(count, least=2, tokens=tokens)
    if tokens % 2 or vocab_size < 3:
        raise ValueError(f"tokens must be even and vocab_size at least 3, but came as {tokens} and {vocab_size}")
    half = (vocab_size - 1) // 2
    value_of = half + torch.randperm(half, generator=torch.Generator().manual_seed(facts))
    key = integers(0, half, (count, tokens // 2), generator)
    ids = torch.stack([key, torch.full_like(key, vocab_size - 1)], -1).flatten(1)
    labels = torch.stack([torch.full_like(key, IGNORED), value_of[key]], -1).flatten(1)
    return Examples(ids, labels, vocab_size)


def _check_noise(noise: float, noise_vocab: int) -> None:
    if not 0 <= noise < 1 or noise_vocab < (1 if noise else 0):
        raise ValueError(f"noise must be from 0 to below 1, with noise tokens if it is above 0, but came as {noise} with {noise_vocab}")


def _seen_before(key: Tensor, real: Tensor) -> Tensor:
    """For keys [N, n] whether the same one stands before, among those that are ``real`` [N, n]."""
    same = (key[:, :, None] == key[:, None]) & real[:, None]
    return same.tril(-1).any(-1)


def _one_of(real: Tensor, generator: Generator) -> Tensor:
    """In each row the place of one true value of ``real`` [N, n], each as likely: [N, 1]."""
    chance = torch.rand(real.shape, generator=generator, dtype=torch.float64)
    return torch.where(real, chance, -1.0).argmax(1, keepdim=True)


def _motifs(low: int, high: int, sizes: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """All sequences of different tokens from low to high - 1 with one of ``sizes``: [M, longest] with -1 behind the end, and sizes [M]."""
    listed = [torch.tensor(p) for size in sizes for p in permutations(range(low, high), size)]
    most = max(sizes)
    return torch.stack([F.pad(p, (0, most - len(p)), value=-1) for p in listed]), torch.tensor([len(p) for p in listed])


def _by_size(sizes: Tensor, shape: tuple[int, ...], generator: Generator) -> Tensor:
    """Indices of ``sizes``, in ascending order: first a size, each as likely, then one of it."""
    kinds, first, many = [], 0, sizes.unique_consecutive(return_counts=True)[1].tolist()
    for n in many:
        kinds.append(integers(first, first + n, shape, generator))
        first += n
    size = integers(0, len(many), shape, generator)
    return torch.stack(kinds).gather(0, size[None])[0]
