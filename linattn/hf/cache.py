"""Cache of ``generate()`` that holds a model's state, and the names of caches in transformers."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

import torch
from transformers import Cache
from transformers.modeling_outputs import BaseModelOutputWithPast

from linattn.state import State

NAMES = ("cache", "past_key_values", "cache_params")  # of the argument: since transformers 5.24, earlier, and earlier in Mamba


def name_of_cache(function: Callable) -> str:
    """Name of the cache among the arguments of ``function``, transformers' own or a class of outputs."""
    parameters = signature(function).parameters
    return next(name for name in NAMES if name in parameters)


CACHE = name_of_cache(BaseModelOutputWithPast)  # in calls of generate() and in outputs


def keyword(cache: StateCache | None) -> dict[str, Any]:
    """``cache`` as a keyword of ``generate()`` and of outputs."""
    return {CACHE: cache}


def pop_cache(given: dict[str, Any]) -> Any:
    """Remove the cache from the keywords ``given`` under any of its names and return it; None without one.

    Raises:
        ValueError: for caches under two names.
    """
    popped = {name: given.pop(name, None) for name in NAMES}
    found = {name: cache for name, cache in popped.items() if cache is not None}
    if len(found) > 1:
        raise ValueError(f"{' and '.join(found)} are names of one argument, in different versions of transformers: give one of them")
    return next(iter(found.values()), None)


class StateCache(Cache):
    """Cache with a :class:`linattn.State` and the number of columns of the batch, with padding, that the model has read.

    ``generate()`` counts columns, selects rows for beams and repeats rows. The cache has no layers, because the mixers own the tensors.
    ``ahead``: shorter rows have also read tokens after those columns. ``kept``: the caller keeps the cache and may continue from it
    after ``generate()``. ``prompt``: state and columns after the prompt, during generation.
    """

    prompt: tuple[State, int] | None = None

    def __init__(self, state: State | None = None, seen: int = 0, *, ahead: bool = False, kept: bool = True) -> None:
        super().__init__(layers=[])
        self.state, self.seen, self.ahead, self.kept = state, seen, ahead, kept

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.seen

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1  # unbounded

    @property
    def batch_size(self) -> int:
        return -1 if self.state is None else self.state.rows

    @property
    def is_initialized(self) -> bool:
        return self.state is not None

    @property
    def is_linear(self) -> list[bool]:
        return [False]  # lets generate() omit columns that the model has read, as for keys and values

    @property
    def is_croppable(self) -> bool:
        return False

    def reset(self) -> None:
        self.state, self.seen, self.ahead = None, 0, False

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        if self.state is not None:
            self.state = self.state.select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.state is not None:
            self.state = self.state.fork(repeats)

    def crop(self, tokens_to_remove: int) -> None:
        raise ValueError("a recurrent state cannot forget its last tokens: keep a copy of the earlier state")
