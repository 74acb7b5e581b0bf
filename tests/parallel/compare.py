"""Comparison of a call on parts of a sequence with a single process's call on the whole, with all gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from linattn.parallel import Layout, collectives, context_parallel

LIMIT = 1e-10
DEVICE = "cpu"  # of all tensors; set by the worker
Given = dict[str, Any]  # tensors by name; those in SHARED and INITIAL are replicated, others are split along time
SHARED = ("A", "B0", "C0", "D", "bias", "weight", "bonus", "constant", "initial", "initial_z")
Call = Callable[[Given], tuple[Tensor, ...]]


def leaves(given: Given) -> Given:
    return {name: t.detach().clone().to(DEVICE).requires_grad_() for name, t in given.items()}


def weights(t: Tensor, seed: int) -> Tensor:
    """Random numbers like ``t``, the same in every process."""
    real = torch.randn(t.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return real.to(DEVICE, t.dtype)


def numbers_like(*shape: int) -> Tensor:
    """Random float64 numbers, the same in every process."""
    return weights(torch.empty(shape, dtype=torch.float64), 1)


def error(got: Tensor, wanted: Tensor) -> float:
    """The difference, relative to the norm; shapes must agree."""
    assert got.shape == wanted.shape, f"{list(got.shape)} is not {list(wanted.shape)}"
    got, wanted = (t.detach() if t.is_complex() else torch.where(t.detach() == -torch.inf, 0, t.detach().double()) for t in (got, wanted))
    return float((got - wanted).norm() / wanted.norm().clamp(min=1e-3)) if wanted.numel() else 0.0


def loss_of(timed: Tensor, states: tuple[Tensor, ...], whole: Callable[[Tensor], Tensor], share: float) -> Tensor:
    """A weighted sum of outputs and, with the ``share`` of one process, of states."""
    total = (timed * whole(weights(timed, 7)) if timed.shape[1] else timed).real.sum()
    for i, s in enumerate(states):
        total = total + share * (s * weights(s, 8 + i)).real.sum()
    return total


def differences(call: Call, layout: Layout, given: Given, options: Given, reference: Given | None = None) -> dict[str, float]:
    """Relative errors of outputs, states and gradients in this process. ``call(tensors, cu_seqlens)`` gives (output, states...).

    With ``reference``, the whole is computed in float64 and with these options.
    """
    cu = None if layout.cu_seqlens is None else torch.tensor(layout.cu_seqlens, device=DEVICE)
    whole, own = leaves(given), leaves({n: t if n in SHARED else layout.shard(t, 1) for n, t in given.items()})
    if reference is not None:
        whole = {n: t.detach().double().requires_grad_() for n, t in whole.items()}
    wanted, *states = call({**whole, **options, **(reference or {}), "cu_seqlens": cu})
    weight = weights(wanted, 7)
    ((wanted * weight).real.sum() + sum((s * weights(s, 8 + i)).real.sum() for i, s in enumerate(states))).backward()
    with context_parallel(layout):
        got, *last = call({**own, **options})
    mine = (got * layout.shard(weight, 1)).real.sum()
    (mine + sum((s * weights(s, 8 + i)).real.sum() for i, s in enumerate(last)) / layout.ranks).backward()
    found = {"output": error(got, layout.shard(wanted, 1)), "gathered": error(layout.gather(got, 1), wanted)}
    for i, (s, t) in enumerate(zip(last, states, strict=True)):
        found[f"state {i}"] = error(s, t)
    for name, t in own.items():
        gradient = whole[name].grad
        if t.grad is None:
            found[f"gradient of {name}, which is missing,"] = torch.inf
            t.grad = torch.zeros_like(t)
        if name in SHARED:
            dist.all_reduce(t.grad)
        found[f"gradient of {name}"] = error(t.grad, gradient if name in SHARED else layout.shard(gradient, 1))
    return found


def fault(found: dict[str, float], limit: float = LIMIT, of_gradients: float | None = None) -> str | None:
    """Errors beyond their limits."""
    limits = {name: of_gradients if of_gradients and name.startswith("gradient") else limit for name in found}
    wrong = [f"{name} by {size:.1e}" for name, size in found.items() if not size <= limits[name]]
    return ", ".join(wrong) or None


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """Count the collectives within."""
    originals = {name: getattr(collectives, name) for name in ("_all_gather", "_reduce_scatter")}
    counts = dict.fromkeys(originals, 0)

    def counting(name: str) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return originals[name](*args, **kwargs)

        return run

    with mock.patch.multiple(collectives, **{name: counting(name) for name in counts}):
        yield counts
