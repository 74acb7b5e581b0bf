"""Continuations of many prompts at once, over a pool."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from torch import Tensor

from linattn.arguments import described, whole
from linattn.data.codec import Codec
from linattn.generate.pool import LARGEST, Pool
from linattn.generate.request import Request
from linattn.generate.stream import language_model


def complete(  # noqa: PLR0913  public
    model: Any,
    prompts: Sequence[Tensor | Sequence[int]],
    *,
    max_new_tokens: int,
    samples: int = 1,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    stop: Collection[int | str] = (),
    codec: Codec | None = None,
    slots: int = 64,
) -> list[Request]:
    """Continue each of ``prompts``, of any lengths; returns the requests, ``samples`` of the first prompt, then of the second, ...

    Their ``tokens`` and, with a ``codec``, their ``text`` are the results.

    Args:
        model, codec, slots: see :class:`linattn.generate.Pool`; fewer prompts take fewer slots.
        prompts: tokens of each prompt, [T] or a list of integers, at least one.
        max_new_tokens, temperature, top_k, top_p, stop: see :meth:`linattn.generate.Pool.submit`.
        samples: continuations of each prompt, which is read once for all of them.
        seed: of the first request's random numbers, the others have the next integers; None: random ones.

    Raises:
        TypeError, ValueError: for an invalid argument; nothing is computed.
    """
    given: object = prompts
    if isinstance(given, Tensor | str) or not isinstance(given, Sequence):
        raise TypeError(f"prompts must be a list of prompts, but came as {described(prompts)}")
    total = len(prompts) * whole("samples", samples, 1)
    if not total:
        return []
    longest = max(len(ids) if isinstance(ids, Sequence | Tensor) else 1 for ids in prompts)
    context = max(longest + whole("max_new_tokens", max_new_tokens, 0), 1)
    rows = min(whole("slots", slots, 1, LARGEST), total)
    pool = Pool(language_model("model", model), rows, queue=total, context=context, codec=codec)
    how: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "stop": stop}
    requests: list[Request] = []
    for ids in prompts:
        first = pool.submit(ids, max_new_tokens=max_new_tokens, seed=_next(seed, requests), **how)
        requests.append(first)
        for _ in range(samples - 1):
            requests.append(first if first.done else pool.fork(first, seed=_next(seed, requests)))
    for _ in pool.run():
        pass
    return requests


def _next(seed: int | None, requests: Sequence[Request]) -> int | None:
    return None if seed is None else seed + len(requests)
