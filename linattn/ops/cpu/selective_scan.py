"""Selective scan on a CPU: refusals and calls of the kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from linattn.ops.cpu import library
from linattn.ops.cpu.library import call, empty, plain, rows

CHUNK = 64  # tokens between saved states, as in rows.h
SLAB = 64  # channels of a task, as in selective_scan.cpp
MOST = 128  # largest state of a channel, likewise
GROUPS = 16  # largest number of groups with separate sums of the gradients of A and D
NOTHING = (None, 0, 0, 0)
Arguments = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]  # of forward, without keeps
Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor]


def refusal(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor | None, initial: Tensor | None, cu_seqlens: Tensor | None
) -> str | None:
    """Reason why the kernels do not run the call, or None if they do."""
    if a.shape[1] > MOST:
        return f"it takes states of up to N = {MOST} numbers, but there are {a.shape[1]}"
    return library.refusal(x, dt, a, b, c, d, initial, cu_seqlens)


def forward(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor | None, initial: Tensor | None, cu_seqlens: Tensor | None, keeps: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Run :func:`linattn.selective_scan` in the dtypes of its arguments.

    Returns y [B, T, D] in the dtype of ``x``, the last states [rows, D, N], and, with ``keeps``, the states before each chunk.
    """
    return gated((x, dt, a, b, c, d, initial, cu_seqlens), keeps)


def gated(
    given: Arguments, keeps: bool = False, *, bias: Tensor | None = None, softplus: bool = False, z: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Run :func:`forward` on ``given`` with time steps softplus(dt + bias) and outputs times silu(z), without gradients of these."""
    x, dt, a, b, c, d, initial, cu_seqlens = given
    x, b, c = map(library.in_rows, (x, b, c))
    dt = dt.resolve_neg()  # may change the strides
    turned = dt.stride(1) == 1 and dt.shape[1] > 1 and dt.stride(2) > 1  # the kernel transposes contiguous tokens piecewise
    apart, dt = (dt.stride(2), dt) if turned else (1, library.in_rows(dt))
    y, last, kept = _outputs(empty, x, a, cu_seqlens, keeps)
    if cu_seqlens is not None:
        kept.zero_()  # packed sequences may use fewer slots
    call(
        "selective_scan_forward", *rows(x), *rows(dt), *rows(b), *rows(c), *rows(y), *(NOTHING if z is None else rows(library.in_rows(z))),
        apart, plain(bias), softplus, *map(plain, (a, d, initial)),
        library.ends(cu_seqlens), last, kept if keeps else None, last.shape[0], x.shape[1], *a.shape,
    )  # fmt: skip
    return y, last, kept


def _outputs(make: Callable[..., Tensor], x: Tensor, a: Tensor, cu_seqlens: Tensor | None, keeps: bool) -> tuple[Tensor, Tensor, Tensor]:
    batch, tokens, width = x.shape
    sequences = library.sequences(x, cu_seqlens)
    slots = batch * -(-tokens // CHUNK) if cu_seqlens is None else tokens // CHUNK + sequences
    kept = (slots, a.shape[1], width) if keeps else (0,)
    return make(x.shape, x.dtype), make((sequences, *a.shape)), make(kept)


def backward(
    dy: Tensor, dlast: Tensor | None, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor | None,
    cu_seqlens: Tensor | None, kept: Tensor,
) -> Gradients:  # fmt: skip
    """Gradients of x, dt, a, b, c, d (None without one) and of the states before the first tokens."""
    x, dt, b, c, dy = map(library.in_rows, (x, dt, b, c, dy))
    batch, tokens, width = x.shape
    size = a.shape[1]
    sequences = library.sequences(x, cu_seqlens)
    groups, slabs = min(sequences, GROUPS), -(-width // SLAB)
    dx, ddt, da, db, dc, dd, dinitial = _gradients(empty, x, dt, a, b, c, d, cu_seqlens)
    parts_b, parts_c = (empty((slabs, batch, tokens, size)) for _ in "bc")
    parts_a, parts_d = empty((groups, width, size)), empty((groups, width))
    wide_a, wide_d = empty((width, size)), empty((width,))
    call(
        "selective_scan_backward", *rows(x), *rows(dt), *rows(b), *rows(c), *rows(dy), *rows(dx), *rows(ddt), plain(a), plain(d),
        library.ends(cu_seqlens), plain(dlast), kept, dinitial, db, dc, wide_a, wide_d, parts_b, parts_c, parts_a, parts_d,
        sequences, groups, batch, tokens, width, size,
    )  # fmt: skip
    return dx, ddt, da.copy_(wide_a), db, dc, dd if dd is None else dd.copy_(wide_d), dinitial


def _gradients(
    make: Callable[..., Tensor], x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor | None, cu_seqlens: Tensor | None
) -> Gradients:
    dx, ddt, da, db, dc = (make(t.shape, t.dtype) for t in (x, dt, a, b, c))
    dd = None if d is None else make(d.shape, d.dtype)
    return dx, ddt, da, db, dc, dd, make((library.sequences(x, cu_seqlens), *a.shape))


def outputs(x: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The results of :func:`forward` without memory."""
    _, a, *_, cu_seqlens, keeps = rest
    return _outputs(library.like(x), x, a, cu_seqlens, keeps)


def gradients(_dy: Tensor, _dlast: Tensor | None, x: Tensor, *rest: Any) -> Gradients:
    """Empty gradients, as :func:`backward` returns them, for fake results of operators."""
    return _gradients(library.like(x), x, *rest[:-1])
