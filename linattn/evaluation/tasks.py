"""Retrieval tasks in plain text, similar to RULER (arXiv 2404.06654): a prompt of a given length and the expected continuation."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any, cast

from linattn.data.codec import Codec

_FILLER = (
    "The river runs past the mill.", "A cart stands beside the gate.", "The light fades over the fields.", "Smoke rises from the roof.",
    "A dog sleeps under the table.", "The road turns towards the hills.", "Rain falls on the old bridge.", "The clock strikes in the hall.",
)  # fmt: skip
_NAMES = ("amber", "birch", "cedar", "delta", "ember", "falcon", "garnet", "harbor", "indigo", "juniper", "kestrel", "lagoon")


@dataclass(frozen=True)
class Prompt:
    """A prompt and its continuation, as tokens."""

    tokens: list[int]
    answer: list[int]


def prompts(task: str, codec: Codec, length: int, count: int, seed: int) -> list[Prompt]:
    """Make ``count`` prompts of ``task`` with at most ``length`` tokens, answer included.

    Raises:
        ValueError: if the question alone is longer than ``length``.
    """
    return list(_made(task, cast(Hashable, codec), length, count, seed))


@lru_cache(maxsize=32)  # the same for every model of an evaluation
def _made(task: str, codec: Any, length: int, count: int, seed: int) -> tuple[Prompt, ...]:
    rng = random.Random(f"{task} {length} {seed}")  # noqa: S311  (not for cryptography)
    return tuple(_fitted(_TASKS[task], codec, length, rng) for _ in range(count))


Made = tuple[list[str], str, str]  # required sentences of the prompt, the question, the answer


def _needle(rng: random.Random) -> Made:
    name, number = rng.choice(_NAMES), rng.randrange(1000, 10_000)
    return [f"The secret number of {name} is {number}."], f"The secret number of {name} is", f" {number}"


def _variables(rng: random.Random) -> Made:
    """Follow a chain of three assignments, with another chain as distractor."""
    names = rng.sample(_NAMES, 6)
    numbers = rng.sample(range(1000, 10_000), 2)
    chains = [names[:3], names[3:]]
    sentences = [[f"{a} = {n}.", f"{b} = {a}.", f"{c} = {b}."] for (a, b, c), n in zip(chains, numbers, strict=True)]
    return [s for pair in zip(*sentences, strict=True) for s in pair], f"The value of {chains[0][2]} is", f" {numbers[0]}"


def _words(rng: random.Random) -> Made:
    """Name the most frequent word: it occurs six times, four others twice each."""
    names = rng.sample(_NAMES, 5)
    said = [names[0]] * 6 + names[1:] * 2
    rng.shuffle(said)
    return [f"Somebody says {name}." for name in said], "The word that is said most often is", f" {names[0]}"


_TASKS: dict[str, Callable[[random.Random], Made]] = {"needle": _needle, "variables": _variables, "words": _words}


def _fitted(make: Callable[[random.Random], Made], codec: Codec, length: int, rng: random.Random) -> Prompt:
    """Fill up to ``length`` tokens with sentences, and insert the required ones in order at random positions."""
    facts, question, answer = make(rng)
    wanted = codec.encode(answer)
    limit = length - len(wanted)
    if (least := len(codec.encode(_joined(facts, question)))) > limit:
        raise ValueError(f"lengths must be at least {least + len(wanted)} tokens for this task's question and answer, but has {length}")
    sizes = {sentence: len(codec.encode(" " + sentence)) for sentence in _FILLER}
    filler = [rng.choice(_FILLER) for _ in range(length // min(sizes.values()) + 1)]
    places = sorted(rng.random() for _ in facts)

    def tokens(count: int) -> list[int]:
        parts: list[str] = list(filler[:count])
        for done, (place, fact) in enumerate(zip(places, facts, strict=True)):
            parts.insert(round(place * count) + done, fact)
        return codec.encode(_joined(parts, question))

    ends = list(accumulate((sizes[sentence] for sentence in filler), initial=len(codec.encode(_joined(facts, question)))))
    count = bisect_right(ends, limit) - 1  # exact where sentences are encoded independently
    while count < len(filler) and len(tokens(count + 1)) <= limit:
        count += 1
    while len(made := tokens(count)) > limit:
        count -= 1
    return Prompt(made, wanted)


def _joined(sentences: Sequence[str], question: str) -> str:
    return " ".join([*sentences, question])
