"""Detection of tracing: compilers, exporters, dispatch modes, functional transforms, forward mode and autograd.

Kernels read and write memory. Tools that trace single operations of torch must see them as an operator, or get operations of torch
in their place. Only this module detects such tools.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

_PLAIN = frozenset((Tensor, torch.nn.Parameter, type(None)))
_KNOWN = (*_PLAIN, FakeTensor)
_modes, _state = torch._C._len_torch_dispatch_stack, torch._C._get_tracing_state  # looked up once, since every call needs them
_step: ContextVar[bool] = ContextVar("recording_step", default=False)
_LOSES = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)
_VMAP: Any = torch._C._parse_dispatch_key("VmapMode")  # the vmap of torch.autograd.grad


def traced(*tensors: Tensor | None) -> bool:
    """True if a compiler, an exporter, vmap, a dispatch mode or a tensor subclass must see operators."""
    if torch.compiler.is_compiling() or _modes() or _state() is not None:
        return True
    return batched() or not _PLAIN.issuperset(map(type, tensors))


def batched() -> bool:
    """True while a backward pass runs for a batch of gradients without memory: ``is_grads_batched``, or inside vmap."""
    return torch._C._dispatch_tls_is_dispatch_key_included(_VMAP) or transformed()


def transformed() -> bool:
    """True inside a functional transform of ``torch.func``, such as vmap, grad and jvp."""
    return torch._C._are_functorch_transforms_active()


def forward_mode() -> bool:
    """True while derivatives are taken in forward mode, by ``forward_ad`` or ``torch.func.jvp``, which only operations of torch support."""
    return torch.autograd.forward_ad._current_level >= 0


def loses_gradients() -> bool:
    """True inside a graph of a torch whose compiler drops gradients of an autograd.Function: seen in 2.11, silently, and not in 2.13."""
    return _LOSES and torch.compiler.is_compiling()


def faked(*tensors: Tensor | None) -> bool:
    """True under fake-tensor tracing outside of torch's compilers, where a single operator is preferred."""
    if torch.compiler.is_compiling() or not torch._C._len_torch_dispatch_stack() or transformed():
        return False
    return any(type(t) is FakeTensor for t in tensors)


def recording_step() -> bool:
    """True while a step graph is recorded, in which states change by step operators."""
    return not torch.compiler.is_compiling() and _step.get()


@contextmanager
def step_recorded() -> Iterator[None]:
    """Context in which :func:`recording_step` is true, for this thread."""
    before = _step.set(True)
    try:
        yield
    finally:
        _step.reset(before)


def foreign(*tensors: Tensor | None) -> bool:
    """True for tensor subclasses that the operators of this library do not support."""
    return any(type(t) not in _KNOWN for t in tensors)


def hides_values(t: Tensor) -> bool:
    """True if reading the values of ``t`` would break a graph or a transform."""
    if torch.compiler.is_compiling() or transformed() or type(t) not in _PLAIN:
        return True
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None  # make_fx traces operations on real tensors


def wanted(*tensors: Tensor | None) -> bool:
    """True if gradients of any of ``tensors`` are recorded."""
    if torch.is_grad_enabled():
        for t in tensors:  # twice as fast as any() of a generator
            if t is not None and t.requires_grad:
                return True
    return False


def refusal() -> str | None:
    """Reason why no kernel may run now, or None. Tools that trace operations of torch would treat its results as constants."""
    if transformed():
        return "its operators have no rules for vmap and functional transforms"
    if forward_mode():
        return "it has no derivatives in forward mode"
    return None
