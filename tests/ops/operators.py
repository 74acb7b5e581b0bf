"""How tests look at kernels as operators of torch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.ops import cases
from tests.ops.cases import Call, cotangent
from tests.ops.errors import compare


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
    """Remembers with what the operators of this library are called."""

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
