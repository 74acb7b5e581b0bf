"""Selective scan in operations of torch: many chunks in parallel, one token of each at a time.

The number of parallel chunks fits a CPU's cache. A first pass computes each chunk's state from an empty start, a short loop carries
the state over the chunks, and a second pass from these states computes the outputs. If one chunk fills the cache, a single pass
suffices. Every exponent is ``dt A`` of a token or a sum of them, so none is above 0.

The state has D N numbers per token and is never stored for more than a chunk: the backward pass recomputes it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from linattn.ops import tracing
from linattn.ops.torch import scan
from linattn.ops.torch.layout import Dense, Packed, Passage

SIZE = 64  # tokens of a chunk
CACHE = 2**15  # entries of the states of parallel chunks


def selective_scan(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, initial: Tensor, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Compute outputs and last states from ``x``, ``dt`` [B, T, D], ``a`` [D, N], ``b``, ``c`` [B, T, N], ``initial`` [rows, D, N]."""
    batch, tokens, _ = x.shape
    if tokens == 0 or initial.shape[0] == 0 or batch == 0:
        return x, initial
    if torch.compiler.is_compiling():
        return _doubled(x, dt, a, b, c, initial, cu_seqlens)
    size = SIZE if cu_seqlens is not None else min(SIZE, tokens)
    slab = max(1, tokens if x.device.type != "cpu" else CACHE // max(1, batch * a.numel()))
    layout = Dense(tokens, size, slab) if cu_seqlens is None else Packed(cu_seqlens, tokens, size, slab)
    passage = layout.passage(initial[:, None])
    outputs = []
    for slabs in zip(*(layout.split(t[:, :, None], x.dtype) for t in (x, dt, b, c)), strict=True):
        own_x, own_dt, own_b, own_c = (t[:, :, 0] for t in slabs)  # [n, B, C, D] or [n, B, C, N]
        outputs.append(_slab(own_x, own_dt, own_b, own_c, a, passage)[:, :, None])
    return layout.join(outputs)[:, :, 0], passage.final()[:, 0]


def whole(
    run: Callable[..., tuple[Tensor, Tensor]], x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor | None,
    initial: Tensor | None, cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Call ``run``, :func:`selective_scan` or the reference, in the dtype of sums; add ``d`` x and round to the dtype of x."""
    compute_dtype = torch.promote_types(x.dtype, torch.float32)
    if initial is None:
        rows = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        initial = x.new_zeros(rows, *a.shape, dtype=compute_dtype)
    y, last = run(*(t.to(compute_dtype) for t in (x, dt, a, b, c)), initial, cu_seqlens)
    return (y if d is None else torch.addcmul(y, x.to(compute_dtype), d.to(compute_dtype))).to(x.dtype), last


def _doubled(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, initial: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute every state by the scan with doubling blocks: a compiler would unroll a loop of 64 steps for minutes."""
    log, written = dt[..., None] * a, (dt * x)[..., None] * b[..., None, :]  # [B, T, D, N]
    h, last = scan.scan(scan.decayed_sum, log.flatten(-2), written.flatten(-2), initial.flatten(-2), cu_seqlens)
    return (h.view(log.shape) @ c[..., None])[..., 0], last.view(initial.shape)


def _slab(x: Tensor, dt: Tensor, b: Tensor, c: Tensor, a: Tensor, passage: Passage) -> Tensor:
    """Compute outputs [n, B, C, D] of n chunks and carry the state through them."""
    if x.shape[0] == 1:
        y, last = walk(x, dt, b, c, a, passage.enter()[:, 0][None])
        passage.leave(last[0][:, None])
        return y
    _, left = walk(x, dt, b, c, a, x.new_zeros(*x.shape[:2], *a.shape))
    kept = (dt.sum(-2)[..., None] * a).exp()  # [n, B, D, N]
    before = []
    for fade, own in zip(kept.unbind(), left.unbind(), strict=True):
        before.append(passage.enter())
        passage.leave(fade[:, None] * before[-1] + own[:, None])
    return walk(x, dt, b, c, a, torch.stack(before)[:, :, 0])[0]


def walk(x: Tensor, dt: Tensor, b: Tensor, c: Tensor, a: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    """Run chunks from the states ``h`` [n, B, D, N] before them: outputs [n, B, C, D] and the states after them."""
    if tracing.forward_mode():
        return _steps(x, dt, b, c, a, h)
    y, last = _Walk.apply(x, dt, b, c, a, h)
    return y, last


def _steps(x: Tensor, dt: Tensor, b: Tensor, c: Tensor, a: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    """Compute :func:`walk` in differentiable operations of torch."""
    u, outputs = dt * x, []
    for t in range(x.shape[-2]):
        h = torch.addcmul(u[..., t, :, None] * b[..., t, None, :], (dt[..., t, :, None] * a).exp(), h)
        outputs.append((h @ c[..., t, :, None])[..., 0])
    return torch.stack(outputs, -2), h


class _Walk(torch.autograd.Function):
    """Autograd function of :func:`_steps` that saves no states; the backward pass recomputes those of its chunks."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, dt: Tensor, b: Tensor, c: Tensor, a: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        return _steps(x, dt, b, c, a, h)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, dy: Tensor, dh: Tensor) -> tuple[Tensor, ...]:
        if torch.is_grad_enabled():  # a gradient of this gradient is wanted
            return torch.func.vjp(_steps, *ctx.saved_tensors)[1]((dy, dh))
        x, dt, b, c, a, h = ctx.saved_tensors
        return _gradients(x, dt, b, c, a, h, dy, dh)


def _gradients(x: Tensor, dt: Tensor, b: Tensor, c: Tensor, a: Tensor, h: Tensor, dy: Tensor, dh: Tensor) -> tuple[Tensor, ...]:
    """Gradients of ``x``, ``dt``, ``b``, ``c``, ``a`` and ``h`` from those of the results of :func:`walk`."""
    u, states, fades = dt * x, [h], []
    for t in range(x.shape[-2]):
        fades.append((dt[..., t, :, None] * a).exp())
        states.append(torch.addcmul(u[..., t, :, None] * b[..., t, None, :], fades[-1], states[-1]))
    du, db, dc, ddt = [], [], [], []
    da = torch.zeros_like(dh)
    for t in reversed(range(x.shape[-2])):
        dc.append((dy[..., t, None, :] @ states[t + 1])[..., 0, :])
        dh = torch.addcmul(dh, dy[..., t, :, None], c[..., t, None, :])
        du.append((dh @ b[..., t, :, None])[..., 0])
        db.append((u[..., t, None, :] @ dh)[..., 0, :])
        dh = fades[t] * dh
        dlog = dh * states[t]  # of dt A
        ddt.append((dlog * a).sum(-1))
        da = torch.addcmul(da, dt[..., t, :, None], dlog)
    gu, gb, gc, gdt = (torch.stack(g[::-1], -2) for g in (du, db, dc, ddt))
    return gu * dt, torch.addcmul(gdt, gu, x), gb, gc, da.sum((0, 1)), dh
