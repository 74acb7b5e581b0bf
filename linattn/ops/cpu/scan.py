"""The elementwise recurrences on a CPU: calls of the kernels, and their operators. For what comes in float32 at most."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from linattn.ops import tracing
from linattn.ops.cpu import library
from linattn.ops.cpu.library import call, empty, rows

GROUPS = 16  # of sequences, at most, that sum the gradient of a constant decay apart


def scan(kind: str, decay: Tensor, x: Tensor, initial: Tensor | None, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """``decay`` [B, T, D] or [D], ``x`` [B, T, D], ``initial`` [N, D]: every state [B, T, D] and the last ones [N, D].

    ``kind`` is ``"sum"``, with states [B, T, D] in the dtype of ``x``, or ``"maximum"``, with float32 ones.
    """
    tensors = (decay, x, initial)
    if tracing.traced(*tensors, cu_seqlens):
        return _forward_op(kind, *tensors, cu_seqlens)
    return (Scan.apply if tracing.wanted(*tensors) else forward)(kind, *tensors, cu_seqlens)


def forward(kind: str, decay: Tensor, x: Tensor, initial: Tensor | None, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """Every state, and the last ones."""
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


def _save(ctx, inputs, output) -> None:
    ctx.kind, decay, x, initial, cu_seqlens = inputs
    ctx.save_for_backward(decay, None if ctx.kind == "sum" else x, output[0], initial, cu_seqlens)
    ctx.set_materialize_grads(False)


def _differentiate(ctx, d_out: Tensor | None, d_last: Tensor | None):
    decay, x, out, initial, cu_seqlens = ctx.saved_tensors
    if d_out is None:
        d_out = torch.zeros_like(out)
    of_decay = ctx.needs_input_grad[1]
    # Who asks for a second derivative gets the operator's refusal. A sum has the shape and the dtype of x, and never reads it.
    function = _backward_op if torch.is_grad_enabled() or tracing.traced(d_out, out) else backward
    d_decay, d_x, d_initial = function(ctx.kind, decay, out if x is None else x, out, initial, cu_seqlens, d_out, d_last, of_decay)
    return None, d_decay if of_decay else None, d_x, None if initial is None else d_initial, None


def _refuse_second(ctx, *gradients: Tensor):
    raise NotImplementedError('the kernels of the scans have no gradients of gradients: ask for backend="torch"')


class Scan(torch.autograd.Function):
    """The same without an operator between."""

    @staticmethod
    def forward(ctx, *inputs):
        output = forward(*inputs)
        _save(ctx, inputs, output)
        return output

    backward = staticmethod(_differentiate)


def _fake_outputs(kind, _decay, x, _initial, cu_seqlens):
    return _outputs(library.like(x), kind, x, cu_seqlens)


def _fake_gradients(_kind, decay, x, _out, _initial, cu_seqlens, _d_out, _d_last, of_decay):
    return library.given(_gradients(library.like(x), decay if of_decay else None, x, cu_seqlens), x)


_forward_op = library.operator(
    "scan_cpu", "str kind, Tensor decay, Tensor x, Tensor? initial, Tensor? cu_seqlens) -> (Tensor, Tensor)",
    forward, _fake_outputs, _differentiate, _save,
)  # fmt: skip
_backward_op = library.operator(
    "scan_cpu_backward",
    "str kind, Tensor decay, Tensor x, Tensor out, Tensor? initial, Tensor? cu_seqlens, Tensor d_out, Tensor? d_last, bool of_decay) "
    "-> (Tensor, Tensor, Tensor)",
    lambda *arguments: library.given(backward(*arguments), arguments[1]), _fake_gradients, _refuse_second,
)  # fmt: skip
