"""Every mixer under context parallelism: equal to one process on the whole, or refused by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from linattn import mixers
from linattn.mixers import Mixer
from linattn.parallel import Layout, context_parallel
from tests.conformance.checks import halves
from tests.conformance.tools import WIDTH, Make, build, tokens
from tests.parallel import compare
from tests.parallel.compare import error, fault, weights

TOKENS = 11


def cases(mesh: DeviceMesh) -> Iterator[tuple[str, Callable[[], str | None]]]:
    for name in mixers.available():
        info = mixers.info(name)
        if info.kind == "feed-forward":
            continue  # each token on its own
        for half, make in halves(info).items():
            if not runs(make):
                yield f"{half} {name} is refused", partial(refused, make, name, mesh)
                continue
            for cut, how in layouts(mesh.size()).items():
                yield (
                    f"{half} {name}, {cut}",
                    partial(compared, make, Layout.of(mesh, TOKENS, **how), half == "sequence" and info.recurrent),
                )
    for cut, how in {**layouts(mesh.size()), "zigzag": {"order": "zigzag"}}.items():
        windowed = partial(mixers.create, "softmax", window=4)
        yield f"softmax in a window, {cut}", partial(compared, windowed, Layout.of(mesh, TOKENS, **how), True)


def layouts(ranks: int) -> dict[str, dict]:
    return {
        "uneven": {"sizes": [TOKENS - 2 * ranks + 2, *[2] * (ranks - 1)]},
        "packed zigzag": {"order": "zigzag", "cu_seqlens": [0, 4, 4, 9, TOKENS]},
    }


def runs(make: Make) -> bool:
    """True if the mixer claims to run."""
    try:
        build(make).check_sharded()
    except NotImplementedError:
        return False
    return True


def refused(make: Make, name: str, mesh: DeviceMesh) -> str | None:
    mixer, x = build(make).to(compare.DEVICE), tokens(1, 4).to(compare.DEVICE)
    try:
        with context_parallel(Layout.of(mesh, 4 * mesh.size())):
            mixer(*mixer.arguments(x))
    except NotImplementedError as told:
        return None if str(told).startswith(f"{name} does not run under context_parallel") else str(told)
    return "it runs, and nobody says so"


def compared(make: Make, layout: Layout, returning: bool) -> str | None:
    batch = 2 if layout.cu_seqlens is None else 1
    cu = None if layout.cu_seqlens is None else torch.tensor(layout.cu_seqlens, device=compare.DEVICE)
    return fault(_differences(build(make).to(compare.DEVICE), tokens(batch, TOKENS, WIDTH).to(compare.DEVICE), cu, layout, returning))


def _differences(mixer: Mixer, x: Tensor, cu: Tensor | None, layout: Layout, returning: bool) -> dict[str, float]:
    inputs = x.clone().requires_grad_(), layout.shard(x, 1).clone().requires_grad_()
    wanted, states, expected = _outcome(mixer, inputs[0], 1.0, lambda t: t, {"cu_seqlens": cu}, returning)
    with context_parallel(layout):
        got, last, gradients = _outcome(mixer, inputs[1], 1 / layout.ranks, lambda t: layout.shard(t, 1), {}, returning)
    found = {"output": error(got, layout.shard(wanted, 1))}
    found |= {f"state {name}": error(last[name], s) for name, s in states.items()}
    found["gradient of x"] = error(inputs[1].grad, layout.shard(inputs[0].grad, 1))
    for name, gradient in gradients.items():
        dist.all_reduce(gradient)
        found[f"gradient of {name}"] = error(gradient, expected[name])
    return found


def _outcome(mixer: Mixer, x: Tensor, share: float, cut: Callable, how: dict, returning: bool) -> tuple[Tensor, dict, dict]:
    mixer.zero_grad()
    y = mixer(x, return_state=returning, **how)
    y, states = y if returning else (y, {})
    weight = weights(torch.empty(x.shape[0], TOKENS, WIDTH, dtype=x.dtype), 5)
    loss = (y * cut(weight)).sum()
    for i, s in enumerate(states.values()):
        if s.requires_grad:
            loss = loss + share * (torch.where(s.isfinite(), s, 0) * weights(s, 6 + i)).sum()
    loss.backward()
    zeros = {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in mixer.named_parameters()}
    return y.detach(), {n: s.detach() for n, s in states.items()}, zeros
