"""Which backend runs a scan, and why each other one does not, in the words of :mod:`linattn.ops.dispatch`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from linattn.arguments import described
from linattn.ops import gpu

BACKENDS: tuple[str, ...] = ("triton", "cpu", "torch", "reference")  # in the order in which auto asks them
Refusal = Callable[[str], str | None]  # of a backend: why it does not run a call, or None
_VMAP: Any = torch._C._parse_dispatch_key("VmapMode")  # of the vmap that torch.autograd.grad still has


def choose(backend: str, refusal: Refusal) -> str:
    """The backend that runs a call.

    Raises:
        ValueError: ``backend`` is none, or refuses the call.
    """
    if not isinstance(backend, str) or backend not in ("auto", *BACKENDS):
        raise ValueError(f"backend must be one of {', '.join(map(repr, ('auto', *BACKENDS)))}, but came as {described(backend)}")
    for name in BACKENDS if backend == "auto" else (backend,):
        reason = refusal(name)
        if reason is None:
            return name
    raise ValueError(f"backend {backend!r} cannot run this call: {reason}")


def explained(title: str, backend: str, refusal: Refusal, device: torch.device) -> str:
    """Print which backend runs a call on ``device`` and why each other does not; the printed text."""
    chosen, lines = choose(backend, refusal), [title]
    for name in BACKENDS:
        reason = refusal(name) or ("it was not asked for" if backend != "auto" else f"{chosen} comes first")
        lines.append(f"{name:>10}: runs" if name == chosen else f"{name:>10}: no, {reason}")
    if chosen == "triton":
        from linattn.ops.triton.launch import off

        lines += off(device)
    text = "\n".join(lines)
    print(text)
    return text


def gpu_refusal(x: Tensor, backend: str) -> str | None:
    """Why no GPU kernel runs ``x``, whatever it computes, or None."""
    # On a CPU the kernels only ever run under Triton's interpreter, and only when asked for.
    return gpu.refusal(x.device, backend == "triton") or transform_refusal()


def transform_refusal() -> str | None:
    """Why no kernel runs now, whatever it computes: what looks at single operations of torch would take its results for constants."""
    if torch._C._are_functorch_transforms_active():
        return "its operators have no rules for vmap and functional transforms"
    if forward_mode():
        return "it has no derivatives in forward mode"
    return None


def forward_mode() -> bool:
    """Whether derivatives are taken in forward mode, by ``forward_ad`` or ``torch.func.jvp``: operations of torch alone know how."""
    return torch.autograd.forward_ad._current_level >= 0


def batched() -> bool:
    """Whether a backward pass runs for many gradients at once, which have no memory: ``is_grads_batched``, or a vmap around it."""
    return torch._C._dispatch_tls_is_dispatch_key_included(_VMAP) or torch._C._are_functorch_transforms_active()


def definition_refusal(backend: str) -> str | None:
    """Why the reference does not run a call."""
    return None if backend == "reference" else "it is the definition that the others are tested against; it runs when asked for"
