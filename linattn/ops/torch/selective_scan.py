"""The selective scan in plain torch: chunks side by side, a token of each at a time.

As many chunks go side by side as fill a CPU's cache. The first walk gives what each chunk leaves of itself, a short loop
hands the state from chunk to chunk, and the second walk, from the right states, gives the outputs. Where one chunk fills
the cache alone, one walk does. Every exponent is a token's own ``dt A`` or a sum of them, so none is above 0.

The state is D N numbers a token and never stored for more than a chunk: the gradient walks it again.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from linattn.ops import tracing
from linattn.ops.torch import scan
from linattn.ops.torch.layout import Dense, Packed

SIZE = 64  # tokens of a chunk
CACHE = 2**15  # entries of the states that go side by side


def selective_scan(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, initial: Tensor, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    """``x`` and ``dt`` [B, T, D], ``a`` [D, N], ``b`` and ``c`` [B, T, N], ``initial`` [rows, D, N]: outputs and last states."""
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
    """``run``, the one above or the definition, in the dtype of sums, with ``d`` x beside it and rounded to the dtype of x."""
    wide = torch.promote_types(x.dtype, torch.float32)
    if initial is None:
        rows = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        initial = x.new_zeros(rows, *a.shape, dtype=wide)
    y, last = run(x.to(wide), dt.to(wide), a.to(wide), b.to(wide), c.to(wide), initial, cu_seqlens)
    return (y if d is None else torch.addcmul(y, x.to(wide), d.to(wide))).to(x.dtype), last


def _doubled(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, initial: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute every state by the scan with doubling blocks: a compiler would unroll a walk of 64 steps for minutes."""
    log, written = dt[..., None] * a, (dt * x)[..., None] * b[..., None, :]  # [B, T, D, N]
    h, last = scan.scan(scan.decayed_sum, log.flatten(-2), written.flatten(-2), initial.flatten(-2), cu_seqlens)
    return (h.view(log.shape) @ c[..., None])[..., 0], last.view(initial.shape)


def _slab(x: Tensor, dt: Tensor, b: Tensor, c: Tensor, a: Tensor, passage) -> Tensor:
    """Outputs [n, B, C, D] of n chunks, and the state handed through them."""
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
    """Chunks from the states ``h`` [n, B, D, N] before them: outputs [n, B, C, D] and the states after them."""
    if tracing.forward_mode():
        return _steps(x, dt, b, c, a, h)
    y, last = _Walk.apply(x, dt, b, c, a, h)
    return y, last


def _steps(x: Tensor, dt: Tensor, b: Tensor, c: Tensor, a: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    """:func:`walk` in operations that autograd knows."""
    u, outputs = dt * x, []
    for t in range(x.shape[-2]):
        h = torch.addcmul(u[..., t, :, None] * b[..., t, None, :], (dt[..., t, :, None] * a).exp(), h)
        outputs.append((h @ c[..., t, :, None])[..., 0])
    return torch.stack(outputs, -2), h


class _Walk(torch.autograd.Function):
    """:func:`_steps`, keeping no states: the gradient makes those of its chunks once more."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, dt: Tensor, b: Tensor, c: Tensor, a: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        return _steps(x, dt, b, c, a, h)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, dy: Tensor, dh: Tensor):
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
