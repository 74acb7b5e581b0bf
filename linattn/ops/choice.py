"""Which backend runs a scan, and why each other one does not, in the words of :mod:`linattn.ops.dispatch`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from linattn.arguments import described
from linattn.ops import gpu, tracing

BACKENDS: tuple[str, ...] = ("triton", "cpu", "torch", "reference")  # in the order in which auto asks them
Refusal = Callable[[str], str | None]  # of a backend: why it does not run a call, or None


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
    return gpu.refusal(x.device, backend == "triton") or tracing.refusal()


def definition_refusal(backend: str) -> str | None:
    """Why the reference does not run a call."""
    return None if backend == "reference" else "it is the definition that the others are tested against; it runs when asked for"
