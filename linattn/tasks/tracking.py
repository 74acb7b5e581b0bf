"""State tracking: parity, and the word problems of small groups (arXiv 2404.08819, 2411.12537)."""

from __future__ import annotations

from functools import cache
from itertools import permutations

import torch
from torch import Generator, Tensor

from linattn.tasks.examples import Examples, integers, whole

GROUPS = {"S3": (3, False), "A5": (5, True), "S5": (5, False)}  # number of permuted things; True: even permutations only


def parity(count: int, *, tokens: int, generator: Generator) -> Examples:
    """Random bits; asked at every place: the parity of the bits so far (arXiv 2411.12537).

    It is the word problem of the group of order two.

    Returns:
        Examples with ``tokens`` tokens, all of which ask.

    Raises:
        ValueError: for fewer than 1 token.
    """
    whole(count, least=1, tokens=tokens)
    ids = integers(0, 2, (count, tokens), generator)
    return Examples(ids, ids.cumsum(1) % 2, 2)


def word_problem(count: int, *, group: str, tokens: int, generator: Generator) -> Examples:
    """Random elements of ``group``; asked at every place: the product of all elements so far, the latest applied last (arXiv 2404.08819).

    Args:
        count: N.
        group: "S3" (6 elements), "A5" (60, not solvable) or "S5" (120): one token for each, in lexicographic order of the permutations.
        tokens: T.
        generator: of all draws.

    Returns:
        Examples with T tokens, all of which ask.

    Raises:
        ValueError: for another group, or fewer than 1 token.
    """
    if group not in tuple(GROUPS):
        raise ValueError(f"group must be one of {', '.join(GROUPS)}, but came as {group!r}")
    whole(count, least=1, tokens=tokens)
    table = products(group)
    ids = integers(0, len(table), (count, tokens), generator)
    labels = torch.empty_like(ids)
    state = torch.zeros(count, dtype=torch.int64)  # the identity is the first permutation
    for t in range(tokens):
        state = table[ids[:, t], state]
        labels[:, t] = state
    return Examples(ids, labels, len(table))


@cache
def products(group: str) -> Tensor:
    """Multiplication table: entry [a, b] is the element that does b first and then a."""
    things, even = GROUPS[group]
    elements = [p for p in permutations(range(things)) if not even or _is_even(p)]
    index = {p: i for i, p in enumerate(elements)}
    return torch.tensor([[index[tuple(a[i] for i in b)] for b in elements] for a in elements])


def _is_even(p: tuple[int, ...]) -> bool:
    return sum(p[i] > p[j] for i in range(len(p)) for j in range(i + 1, len(p))) % 2 == 0
