"""Shared by the checks: deterministic mixers and tokens, and comparison of two routes with their gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from linattn import State
from linattn.mixers import Mixer

Make = Callable[..., Mixer]  # make(dim=...) -> a new mixer
States = dict[str, Tensor]
Route = Callable[..., tuple[Tensor, list[States]]]  # inputs -> outputs in one order, final states in the order of their rows

WIDTH, TOKENS = 32, 12
PROBE = 3  # tokens that read a state
MASK = torch.tensor([[0, 1, 1, 0, 0, 1, 0], [1, 1, 1, 1, 1, 1, 1], [1, 1, 0, 0, 0, 0, 0]]).bool()  # [B, T], real tokens


def build(make: Make, *, dim: int = WIDTH, dtype: torch.dtype = torch.float64) -> Mixer:
    """Create a deterministic mixer with no parameter at a special value, since a gate of 0 would hide errors."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        mixer = make(dim=dim).to(dtype)
        for p in mixer.parameters():
            p.add_(0.05 * torch.randn_like(p))
    return mixer


def tokens(batch: int, length: int, dim: int = WIDTH, *, seed: int = 1, dtype: torch.dtype = torch.float64) -> Tensor:
    """Deterministic random tokens [B, T, D]."""
    return torch.randn(batch, length, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def called(mixer: Mixer, x: Tensor) -> Tensor:
    """The output of a mixer of any kind for tokens x [B, T, D]."""
    y = mixer(*mixer.arguments(x))
    return y[0] if isinstance(y, tuple) else y


def weighed(y: Tensor, seed: int = 3) -> Tensor:
    """Loss of all elements of ``y`` with random weights."""
    y = y.to(torch.promote_types(y.dtype, torch.float32))
    return (y * torch.randn(y.shape, generator=torch.Generator().manual_seed(seed), dtype=y.dtype)).sum()


def rows_of(state: States) -> int:
    return next(iter(state.values())).shape[0]


def picked(state: States, *rows: int) -> States:
    return State([state]).select(rows).layers[0]


def outcome(mixer: Mixer, route: Route, *inputs: Tensor) -> dict[str, Tensor]:
    """Results on which routes must agree: outputs, outputs of further tokens from the final states, positions, and the gradients of all of
    them with respect to the inputs and every parameter.

    States are compared by outputs because their layout may differ (a cache may have unused slots).
    """
    inputs = tuple(x.clone().requires_grad_() for x in inputs)
    y, states = route(*inputs)
    further, start, answers = tokens(sum(map(rows_of, states)), PROBE, seed=2), 0, []
    for state in states:
        stop = start + rows_of(state)
        answers.append(mixer(further[start:stop], state))
        start = stop
    answer = torch.cat(answers)
    loss = weighed(y) + weighed(answer, seed=4)
    names, parameters = zip(*mixer.named_parameters(), strict=True)
    gradients = torch.autograd.grad(loss, [*inputs, *parameters], materialize_grads=True)
    labels = [f"the gradient of {n}" for n in (*(f"input {i}" for i in range(len(inputs))), *names)]
    positions = torch.cat([s["position"] for s in states])
    return {"the output": y.detach(), "the output after the final state": answer.detach(), "the position": positions} | dict(
        zip(labels, gradients, strict=True)
    )


def graded(mixer: Mixer, route: Callable[..., Tensor], *inputs: Tensor) -> dict[str, Tensor]:
    """The output of a route without states, and its gradients with respect to the inputs and every parameter."""
    inputs = tuple(x.clone().requires_grad_() for x in inputs)
    y = route(*inputs)
    names, parameters = zip(*mixer.named_parameters(), strict=True)
    gradients = torch.autograd.grad(weighed(y), [*inputs, *parameters], materialize_grads=True)
    labels = [f"the gradient of {n}" for n in (*(f"input {i}" for i in range(len(inputs))), *names)]
    return {"the output": y.detach()} | dict(zip(labels, gradients, strict=True))


def assert_same(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], what: str, tolerance: float = 1e-9) -> None:
    """Compare each of ``ours`` with the tensor of the same name, relative to the largest element."""
    for name, wanted in theirs.items():
        got = ours[name]
        assert got.shape == wanted.shape, f"{what}: {name} has shape {list(got.shape)}, not {list(wanted.shape)}"
        if not wanted.numel():
            continue
        error = (got.double() - wanted.double()).abs().max().item()
        bound = tolerance * (wanted.double().abs().max().item() + 1e-3)
        assert error <= bound, f"{what}: {name} is off by {error:.2e}, more than {bound:.2e}"


def assert_bits(got: Tensor, wanted: Tensor, what: str) -> None:
    """Assert equal shape, dtype and bits."""
    assert got.dtype == wanted.dtype and got.shape == wanted.shape, (
        f"{what}: {got.dtype} {list(got.shape)} != {wanted.dtype} {list(wanted.shape)}"
    )
    if not torch.equal(got, wanted):
        raise AssertionError(f"{what}: {(got != wanted).sum().item()} of {got.numel()} numbers differ")


def assert_finite(t: Tensor, what: str) -> None:
    assert t.isfinite().all(), f"{what} has {(~t.isfinite()).sum().item()} of {t.numel()} numbers that are not finite"
