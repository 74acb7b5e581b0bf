"""Checks of kernels as operators of torch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import linattn
from tests.ops import cases
from tests.ops.cases import Call, cotangent
from tests.ops.errors import compare

# Changes of a delta-rule call that kernels refuse, with words of the reason.
UNSUPPORTED: list[tuple[Callable[[Call], Call], str]] = [
    (lambda c: c.double(), "float64"),
    (lambda c: c.tokens(0, 0), "no tokens"),
    (lambda c: c.without("beta", "decay").set(causal=False), "without causality"),
]


def leaves_of(call: Call) -> list[Tensor]:
    return [t.detach().clone().requires_grad_() for t in call.tensors.values()]


def check_compiled(function: Callable, call: Call, wanted: tuple[dict[str, Tensor], dict[str, Tensor]]) -> None:
    """Values and gradients of the compiled ``function`` on the tensors of ``call`` are those ``wanted``."""
    leaves = leaves_of(call)
    out = function(leaves, call.options.get("cu_seqlens"))
    grads = torch.autograd.grad(out, leaves, [cotangent(o) for o in out])
    for found, those in zip((out, grads), wanted, strict=True):
        compare(dict(zip(those, found, strict=True)), those, 1e-6)


class Seen(TorchDispatchMode):
    """Records the arguments of this library's operators."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, tuple] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "linattn":
            self.calls[func._schema.name] = (func, args)
        return func(*args, **kwargs or {})


def check_operators(call: Call, backend: str, forward: str, backward: str) -> None:
    """Both operators, and no other, are called, and are registered as they should: schemas, fakes and, forward, autograd."""
    with Seen() as seen:
        cases.gradients(call, backend=backend)
    checks = {
        f"linattn::{forward}": ("test_schema", "test_autograd_registration", "test_faketensor"),
        f"linattn::{backward}": ("test_schema", "test_faketensor"),
    }
    assert seen.calls.keys() == checks.keys()
    for name, (operator, arguments) in seen.calls.items():
        wanted = name == f"linattn::{forward}"
        arguments = [t.detach().requires_grad_(wanted and t.is_floating_point()) if isinstance(t, Tensor) else t for t in arguments]
        torch.library.opcheck(operator, arguments, test_utils=checks[name])


def check_differentiable_once(call: Call, backend: str, reason: str) -> None:
    """Assert that gradients of gradients are refused with ``reason``."""
    leaves = dict(zip(call.tensors, leaves_of(call), strict=True))
    (grad,) = torch.autograd.grad(call.with_(**leaves)(backend=backend)["o"].sum(), leaves["v"], create_graph=True)
    with pytest.raises(NotImplementedError, match=reason):
        grad.sum().backward()


def check_explained(call: Call, backend: str, form: str, printed: Callable[[], str]) -> None:
    """Assert that ``explain`` says that ``backend`` runs ``call`` in ``form``, alone, and prints what it returns."""
    said = linattn.explain(**call.arguments())
    assert f"{backend}: runs, {form} form" in said and printed().strip() == said
    assert said.count(": runs") == 1 and f"torch: no, {backend} comes first" in said
