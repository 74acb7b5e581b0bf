"""Elementwise recurrences in operations of torch: doubling blocks inside a chunk, and a short loop over chunks.

Each recurrence is defined by ``join``, which combines a state, the sum of the logarithms of later decays, and later contributions.

A compiler would unroll the loops for minutes, and again for every number of chunks, so it gets each scan as one operator, whose
gradient is a scan from the end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from linattn.ops.compilers import exporting
from linattn.ops.operator import register
from linattn.ops.torch.decay import Factor, halves
from linattn.ops.torch.layout import SLAB, Dense, Packed, Passage

SIZE = 64
Join = Callable[[Tensor, Tensor, Tensor], Tensor]  # (state, sum of later logarithms, later contributions) -> state


def decayed_sum(h: Tensor, log: Tensor, later: Tensor) -> Tensor:
    """Compute ``exp(log) h + later``."""
    return Factor.of(log).apply(h.expand_as(log), later)


def decayed_max(m: Tensor, log: Tensor, later: Tensor) -> Tensor:
    """Compute ``max(log + m, later)``."""
    return torch.maximum(log + m, later)


def scan(join: Join, decay: Tensor, x: Tensor, initial: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute every state [B, T, D] and the last of each sequence [N, D] from ``decay`` and ``x`` [B, T, D], ``initial`` [N, D]."""
    if torch.compiler.is_compiling() and not exporting():  # exported programs use PyTorch's operators only
        return compiled_scan(join is decayed_max, decay, x, initial, cu_seqlens)
    return _scan(join, decay, x, initial, cu_seqlens)


def whole(
    run: Callable[..., tuple[Tensor, Tensor]], join: Join, decay: Tensor, x: Tensor, initial: Tensor | None, cu_seqlens: Tensor | None,
    nothing: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Call ``run``, :func:`scan` or the reference, in the dtype of states, with ``nothing`` as the default initial state."""
    compute_dtype = torch.promote_types(torch.promote_types(decay.dtype, x.dtype), torch.float32)
    if initial is None:
        rows = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        initial = x.new_full((rows, x.shape[-1]), nothing, dtype=compute_dtype)
    return run(join, decay.to(compute_dtype).expand(x.shape), x.to(compute_dtype), initial, cu_seqlens)


def _scan(join: Join, decay: Tensor, x: Tensor, initial: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    batch, tokens, _ = x.shape
    if tokens == 0 or initial.numel() == 0:
        return x, initial
    slab = max(1, SLAB // (SIZE * x.shape[-1] * batch))
    layout = Dense(tokens, SIZE, slab) if cu_seqlens is None else Packed(cu_seqlens, tokens, SIZE, slab)
    passage = layout.passage(initial[:, None, None])
    nothing = 0.0 if join is decayed_sum else -torch.inf  # neutral element for padding tokens
    outputs = []
    for log, own in zip(layout.split(decay[:, :, None], x.dtype), layout.split(x[:, :, None], x.dtype, nothing), strict=True):
        # [n, B, 1, C, D]
        own, sums = _within(join, log, own), log.cumsum(-2)
        entered = _carry(join, sums[..., -1:, :], own[..., -1:, :], passage)
        outputs.append(join(entered, sums, own))
    return layout.join(outputs)[:, :, 0], passage.final()[:, 0, 0]


def _within(join: Join, log: Tensor, own: Tensor) -> Tensor:
    """Compute the states of each row from an empty state before its chunk: blocks of 2h rows from their halves."""
    h = 1
    while 2 * h <= own.shape[-2]:
        first, second = halves(own, h)
        second = join(first[..., -1:, :], halves(log, h)[1].cumsum(-2), second)
        own, h = torch.stack([first, second], -3).flatten(-4, -2), 2 * h
    return own


def _carry(join: Join, total: Tensor, last: Tensor, passage: Passage) -> Tensor:
    """Compute the states before each chunk [n, B, 1, 1, D]."""
    before = []
    for log, own in zip(total.unbind(), last.unbind(), strict=True):
        before.append(passage.enter())
        passage.leave(join(before[-1], log, own))
    return torch.stack(before)


def _whole(maximum: bool, decay: Tensor, x: Tensor, initial: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """Operator form of :func:`scan`, of decayed sums or of the ``maximum``."""
    h, last = _scan(decayed_max if maximum else decayed_sum, decay, x, initial, cu_seqlens)
    return h.clone(memory_format=torch.contiguous_format), last.clone(memory_format=torch.contiguous_format)


def _fake(_maximum: bool, _decay: Tensor, x: Tensor, initial: Tensor, _cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), initial.new_empty(initial.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.maximum, decay, x, initial, cu_seqlens = inputs
    ctx.save_for_backward(decay, x, initial, cu_seqlens, output[0])


def _backward(ctx: Any, g: Tensor, g_last: Tensor) -> tuple[Tensor | None, ...]:
    """Differentiate, with w_t = dh_t / dh_{t-1}: a state's gradient is e_t = g_t + w_{t+1} e_{t+1}, a scan from the end begun by g_last."""
    decay, x, initial, cu_seqlens, h = ctx.saved_tensors
    before, ends = _before(h, initial, cu_seqlens)
    if ctx.maximum:
        carried = decay + before
        log = torch.where(carried > x, 1.0, torch.where(carried == x, 0.5, 0.0)).to(x.dtype).log()  # equal values share the gradient
    else:
        log = decay.conj()
    later = torch.where(ends[..., None], 0.0, log.roll(-1, 1)).flip(1).resolve_conj()
    backwards = None if cu_seqlens is None else cu_seqlens[-1] - cu_seqlens.flip(0)
    e, first = compiled_scan(False, later, g.flip(1), g_last.flip(0) if cu_seqlens is not None else g_last, backwards)
    e, w = e.flip(1), log.exp()
    if cu_seqlens is not None:
        first = first.flip(0)
    return None, w * e * (1 if ctx.maximum else before.conj()), (1 - w) * e if ctx.maximum else e, _at_start(w, first, cu_seqlens), None


compiled_scan = register(
    "scan", "(bool maximum, Tensor decay, Tensor x, Tensor initial, Tensor? cu_seqlens) -> (Tensor, Tensor)", _whole, _fake,
    gradient=_backward, keep=_keep,
)  # fmt: skip


def _before(h: Tensor, initial: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """State before each token [B, T, D], and mask of the last tokens of sequences [1, T]."""
    token = torch.arange(h.shape[1], device=h.device)
    if cu_seqlens is None:
        return torch.cat([initial[:, None], h], 1)[:, :-1], (token == h.shape[1] - 1)[None]
    row = torch.searchsorted(cu_seqlens[1:].contiguous(), token, right=True)
    begins = (token == cu_seqlens[row])[:, None]
    return torch.where(begins, initial[row], h[0].roll(1, 0))[None], (token + 1 == cu_seqlens[row + 1])[None]


def _at_start(w: Tensor, first: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Gradients of the initial states [N, D]: w_1 e_1 for a sequence with tokens, ``first`` for an empty one."""
    if w.shape[1] == 0:
        return first
    if cu_seqlens is None:
        return w[:, 0] * first
    place = cu_seqlens[:-1].clamp(max=w.shape[1] - 1)
    return torch.where((cu_seqlens.diff() > 0)[:, None], w[0, place], 1.0) * first
