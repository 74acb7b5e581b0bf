"""Calls of the CPU kernels of elementwise recurrences, for at most float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from linattn.ops.cpu import library
from linattn.ops.cpu.library import call, empty, rows

GROUPS = 16  # largest number of groups of sequences with separate sums of a constant decay's gradient


def refusal(*call: Any) -> str | None:
    """Reason why the kernels do not run a call, or None."""
    return library.refusal(*call[1:])


def forward(kind: str, decay: Tensor, x: Tensor, initial: Tensor | None, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute every state [B, T, D] and the last ones [N, D] from ``decay`` [B, T, D] or [D], ``x`` [B, T, D] and ``initial`` [N, D].

    ``kind`` is ``"sum"``, with states in the dtype of ``x``, or ``"maximum"``, with float32 ones.
    """
    out, last = _outputs(empty, kind, x, cu_seqlens)
    x = library.in_rows(x)
    call(
        "scan_forward", kind == "sum", decay.ndim == 1, *_decays(decay), *rows(x), *rows(out), library.plain(initial),
        library.ends(cu_seqlens), last, last.shape[0], x.shape[1], x.shape[2],
    )  # fmt: skip
    return out, last


def _outputs(make: Callable[..., Tensor], kind: str, x: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    return make(x.shape, x.dtype if kind == "sum" else torch.float32), make((library.sequences(x, cu_seqlens), x.shape[2]))


def backward(
    kind: str, decay: Tensor, x: Tensor, out: Tensor, initial: Tensor | None, cu_seqlens: Tensor | None,
    d_out: Tensor, d_last: Tensor | None, of_decay: bool,
) -> tuple[Tensor | None, Tensor, Tensor]:  # fmt: skip
    """Gradients of decay (None unless ``of_decay``), of x and of the states before the first tokens."""
    d_decay, d_x, d_initial = _gradients(empty, decay if of_decay else None, x, cu_seqlens)
    x, out, d_out = map(library.in_rows, (x, out, d_out))
    sequences, constant = d_initial.shape[0], decay.ndim == 1
    groups = min(sequences, GROUPS)
    parts = empty((groups, x.shape[2])) if of_decay and constant else None
    call(
        "scan_backward", kind == "sum", constant, of_decay, *_decays(decay), *rows(x), *rows(out), *rows(d_out), *rows(d_x),
        *_decays(decay if d_decay is None else d_decay), library.plain(initial), library.ends(cu_seqlens), library.plain(d_last), d_initial,
        parts, sequences, groups, x.shape[1], x.shape[2],
    )  # fmt: skip
    return d_decay, d_x, d_initial


def _gradients(
    make: Callable[..., Tensor], decay: Tensor | None, x: Tensor, cu_seqlens: Tensor | None
) -> tuple[Tensor | None, Tensor, Tensor]:
    d_decay = None if decay is None else make(decay.shape, decay.dtype)
    return d_decay, make(x.shape, x.dtype), make((library.sequences(x, cu_seqlens), x.shape[2]))


def _decays(decay: Tensor) -> tuple[Tensor, int, int, int]:
    return rows(library.in_rows(decay[None, None] if decay.ndim == 1 else decay))


def outputs(kind: str, _decay: Tensor, x: Tensor, _initial: Tensor | None, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """The results of :func:`forward` without memory."""
    return _outputs(library.like(x), kind, x, cu_seqlens)


def gradients(_kind: str, decay: Tensor, x: Tensor, *rest: Any) -> tuple[Tensor | None, Tensor, Tensor]:
    """Empty gradients, as :func:`backward` returns them, for fake results of operators."""
    return _gradients(library.like(x), decay if rest[-1] else None, x, rest[2])
