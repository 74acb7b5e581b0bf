"""Detection of tracing: compilers, exporters, dispatch modes, functional transforms, forward mode and autograd.

Kernels read and write memory. Whatever follows single operations of torch has to see them as an operator, or be given operations of
torch in their place. Each question about that is asked here and nowhere else.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

_PLAIN = frozenset((Tensor, torch.nn.Parameter, type(None)))
_KNOWN = (*_PLAIN, FakeTensor)
_modes, _state = torch._C._len_torch_dispatch_stack, torch._C._get_tracing_state  # looked up once: every small call asks
_VMAP: Any = torch._C._parse_dispatch_key("VmapMode")  # of the vmap that torch.autograd.grad still has


def traced(*tensors: Tensor | None) -> bool:
    """True if a compiler, an exporter, a vmap, a dispatch mode or a subclass of tensors must see operators."""
    if torch.compiler.is_compiling() or _modes() or _state() is not None:
        return True
    return batched() or not _PLAIN.issuperset(map(type, tensors))


def batched() -> bool:
    """True while a backward pass runs for many gradients at once, which have no memory: ``is_grads_batched``, or a vmap around it."""
    return torch._C._dispatch_tls_is_dispatch_key_included(_VMAP) or transformed()


def transformed() -> bool:
    """True within a functional transform: vmap, grad, jvp and their like of ``torch.func``."""
    return torch._C._are_functorch_transforms_active()


def forward_mode() -> bool:
    """True while derivatives are taken in forward mode, by ``forward_ad`` or ``torch.func.jvp``: operations of torch alone know how."""
    return torch.autograd.forward_ad._current_level >= 0


def faked(*tensors: Tensor | None) -> bool:
    """True under fake-tensor tracing outside of torch's compilers, to which one operator is more than ten."""
    if torch.compiler.is_compiling() or not torch._C._len_torch_dispatch_stack() or transformed():
        return False
    return any(type(t) is FakeTensor for t in tensors)


def foreign(*tensors: Tensor | None) -> bool:
    """True for subclasses of tensors that no operator of this library knows."""
    return any(type(t) not in _KNOWN for t in tensors)


def hides_values(t: Tensor) -> bool:
    """True where a look at the numbers of ``t`` would break a graph or a transform."""
    if torch.compiler.is_compiling() or transformed() or type(t) not in _PLAIN:
        return True
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None  # make_fx records what is done to real tensors


def wanted(*tensors: Tensor | None) -> bool:
    """True if gradients of any of ``tensors`` will be asked for."""
    if torch.is_grad_enabled():
        for t in tensors:  # any() of a generator takes twice as long
            if t is not None and t.requires_grad:
                return True
    return False


def refusal() -> str | None:
    """Reason why no kernel may run now, or None. Tools that record operations of torch would take its results for constants."""
    if transformed():
        return "its operators have no rules for vmap and functional transforms"
    if forward_mode():
        return "it has no derivatives in forward mode"
    return None
