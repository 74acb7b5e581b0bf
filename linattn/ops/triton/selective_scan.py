"""Selective scan on a GPU: configurations and launches."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from linattn.ops import tracing
from linattn.ops.torch import selective_scan as portable
from linattn.ops.triton import fitting, launch, scan, scan_kernels
from linattn.ops.triton import selective_scan_gradients as gradient_kernels
from linattn.ops.triton import selective_scan_kernels as kernels


class Config(NamedTuple):
    """Sizes of a walk."""

    channels: int  # of a lane
    tokens: int  # of a tile, a multiple of 4
    registers: int  # at most, of a thread; they determine the number of resident warps
    warps: int = 1  # of a program


ENDS = Config(channels=1, tokens=8, registers=128)
FORWARD = Config(channels=2, tokens=4, registers=168)
BACKWARD = Config(channels=2, tokens=8, registers=168, warps=4)
APART = 64  # tokens between the states that forward saves for backward; a segment has a multiple of as many
TOGETHER = kernels.TOGETHER.value
HELD, HELD_AGAIN = 16, 8  # most states of a channel that a walk keeps in registers, and in backward the second walk of forward
PACKED = 4  # the same for packed sequences but in forward: tiles with marks have code of their own, and compilation would take 20 s more
REGISTERS = 65536 // 32  # registers of a multiprocessor, for each thread of a warp
LARGEST = 256  # largest number of states of a channel
MOST = 32767  # largest batch: a row takes two of at most 65,535 programs along a grid's second dimension


def refusal(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, *_: Tensor | None) -> str | None:
    """Reason why the kernels do not run the call, or None if they do."""
    if torch.float64 in (t.dtype for t in (x, dt, a, b, c)):
        return "its sums are float32, and float64 was given"
    if not 1 <= a.shape[-1] <= LARGEST:
        return f"a channel can have 1 to {LARGEST} states, but A has shape {list(a.shape)}"
    if x.shape[0] > MOST:
        return f"it takes at most {MOST} rows at a time, and there are {x.shape[0]}"
    passes = ("forward", "backward") if tracing.wanted(x, dt, a, b, c) else ("forward",)
    return fitting.refusal(*((each, *_name(x, dt, a)) for each in passes))


def _name(x: Tensor, dt: Tensor, a: Tensor, *_: object) -> tuple[Hashable, ...]:
    return "selective_scan", x.device, x.dtype, dt.dtype, a.shape


def _portable(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor | None, initial: Tensor | None, cu_seqlens: Tensor | None, keep: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute :func:`forward` in operations of torch, without saved states."""
    kept = outputs(x, dt, a, b, c, d, initial, cu_seqlens, keep)[2]
    return *portable.whole(portable.selective_scan, x, dt, a, b, c, d, initial, cu_seqlens), kept


def _portable_backward(*arguments: Any) -> tuple[Tensor | None, ...]:
    """Run :func:`backward` in operations of torch."""
    *inputs, cu_seqlens, _, d_y, d_last = arguments

    def run(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor | None, initial: Tensor | None) -> tuple[Tensor, Tensor]:
        return portable.whole(portable.selective_scan, x, dt, a, b, c, d, initial, cu_seqlens)

    return tuple(fitting.differentiated(run, tuple(inputs), (d_y, d_last)))


@fitting.or_else(_portable, lambda *arguments: ("forward", *_name(*arguments)))
def forward(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor | None, initial: Tensor | None, cu_seqlens: Tensor | None, keep: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """``x`` and ``dt`` [B, T, D], ``a`` [D, N], ``b`` and ``c`` [B, T, N], ``d`` [D], ``initial`` [rows, D, N], which is float32.

    Returns y in the dtype of ``x``, ``d`` x in it, the last states [rows, D, N], float32, and with ``keep``, for backward, the states
    [B, groups, N, D] before each group of tiles.
    """
    if not x.numel():
        y, last, kept = outputs(x, dt, a, b, c, d, initial, cu_seqlens, keep)
        return y, last.zero_() if initial is None else last.copy_(initial), kept
    tensors = (*_contiguous(x, dt, a), b, c, *_contiguous(d, initial, cu_seqlens))
    y, last, kept, *_ = launch.run(_forward, x, tensors, keep)
    return y, last, x.new_empty((0,), dtype=torch.float32) if kept is None else kept


def _contiguous(*tensors: Tensor | None) -> launch.Tensors:
    return tuple([t if t is None else t.contiguous() for t in tensors])


def _groups(tokens: int) -> int:
    """Number of states that forward saves."""
    return -(-tokens // APART)


def _held(size: int, most: int) -> int:
    """The largest divisor of ``size`` up to ``most``."""
    return next(h for h in range(min(most, size), 0, -1) if size % h == 0)


def outputs(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor | None, initial: Tensor | None, cu_seqlens: Tensor | None, keep: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The results of :func:`forward` without memory."""
    batch, tokens, width = x.shape
    rows = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    kept = (batch, _groups(tokens), a.shape[1], width) if keep and x.numel() else (0,)
    last = x.new_empty((rows, *a.shape), dtype=torch.float32)
    return x.new_empty(x.shape), last, x.new_empty(kept, dtype=torch.float32)


def _forward(recorder: launch.Recorder, *arguments: Any) -> launch.Tensors:
    """Outputs, last states, states before the tiles if requested, and marks that must be zeros."""
    x, dt, a, b, c, d, initial, cu, keep = arguments
    work = _Launch(recorder, x, a, b, c, cu, FORWARD)
    y, last = recorder.empty(*x.shape, dtype=x.dtype), recorder.empty(work.sequences, *a.shape, dtype=torch.float32)
    kept = recorder.empty(work.batch, _groups(work.tokens), work.size, work.width, dtype=torch.float32) if keep else None
    starts, stops = work.boundaries(cu, initial, last)
    states = recorder.empty(work.batch, work.segments, work.size, work.width, dtype=torch.float32)
    work.enter(x, dt, initial, starts, stops, states, reverse=False)
    held = _held(work.size, HELD)
    sums = None if held == work.size else recorder.empty(*x.shape, dtype=torch.float32)
    tensors = (x, dt, work.faded, work.both, d, initial, starts, stops, states, kept, sums, y, last)
    work(kernels.forward, FORWARD, tensors, H=held, GROUP=APART // FORWARD.tokens)
    return y, last, kept, starts, stops


@fitting.or_else(_portable_backward, lambda *arguments: ("backward", *_name(*arguments)))
def backward(*arguments: Any) -> tuple[Tensor | None, ...]:
    """Gradients of x, dt, a, b, c, d and initial, each None if the input is None.

    The arguments are those of ``linattn::selective_scan_backward``.
    """
    x, dt, a, b, c, d, initial, cu_seqlens, kept, d_y, d_last = arguments
    if fitting.refusal(("forward", *_name(x, dt, a))):  # the forward pass has saved nothing then
        return _portable_backward(*arguments)
    if not x.numel():
        d_initial = None if initial is None else torch.zeros_like(initial) if d_last is None else d_last.clone()
        return *(None if t is None else torch.zeros_like(t) for t in (x, dt, a, b, c, d)), d_initial
    tensors = (*_contiguous(x, dt, a), b, c, *_contiguous(d, initial, cu_seqlens, kept, d_y, d_last))
    d_x, d_dt, d_a, d_b, d_c, d_d, d_initial, *_ = launch.run(_backward, x, tensors)
    d_a = a.new_empty(a.shape).copy_(d_a.sum((0, 1)).t())
    return d_x, d_dt, d_a, d_b, d_c, None if d is None else d_d.sum((0, 1)).to(d.dtype), d_initial


def _backward(recorder: launch.Recorder, *arguments: Any) -> launch.Tensors:
    """Gradients, those of ``a`` and ``d`` in parts of segments, and marks that must be zeros before."""
    x, dt, a, b, c, d, initial, cu, kept, d_y, d_last = arguments
    work = _Launch(recorder, x, a, b, c, cu, BACKWARD)
    d_x, d_dt, d_b, d_c = (recorder.empty(*t.shape, dtype=t.dtype) for t in (x, dt, b, c))
    d_initial = None if initial is None else recorder.empty(*initial.shape, dtype=torch.float32)
    starts, stops = work.boundaries(cu, d_last, d_initial)
    segments = (work.batch, work.segments)
    carried, d_a = (recorder.empty(*segments, work.size, work.width, dtype=torch.float32) for _ in range(2))
    d_d = None if d is None else recorder.empty(*segments, work.width, dtype=torch.float32)
    blocks, group = work.blocks(BACKWARD), triton.cdiv(min(APART, work.tokens), BACKWARD.tokens)
    within = recorder.empty(blocks * work.segments * work.batch, group - 1, work.size, work.wide(BACKWARD), dtype=torch.float32)
    d_both = recorder.empty(blocks, *work.both.shape, dtype=torch.float32)
    work.enter(d_y, dt, d_last, starts, stops, carried, reverse=True)
    tensors = (x, dt, work.faded, work.both, d, initial, d_y, d_last, starts, stops, kept, within, carried)
    results = (d_x, d_dt, d_a, d_both, d_d, d_initial)
    work(
        gradient_kernels.backward,
        BACKWARD,
        tensors + results,
        work.batch,
        H=_held(work.size, HELD_AGAIN if cu is None else PACKED),
        GROUP=group,
        W=work.warps(BACKWARD),
    )
    grid = (triton.cdiv(work.tokens, 64), 2 * work.batch, 1)
    numbers = (work.tokens, work.padded, blocks)
    recorder.launch(gradient_kernels.gather, grid, (d_both, d_b, d_c), numbers, N=work.size, NB=work.padded_size, TB=64, num_warps=4)
    return d_x, d_dt, d_a, d_b, d_c, d_d, d_initial, starts, stops


class _Launch:
    """Arguments shared by the launches of a pass: the shapes, the segments, and A, B and C in the kernels' layout."""

    def __init__(self, recorder: launch.Recorder, x: Tensor, a: Tensor, b: Tensor, c: Tensor, cu: Tensor | None, config: Config) -> None:
        self.recorder = recorder
        self.batch, self.tokens, self.width = x.shape
        self.size = a.shape[1]
        self.sequences = self.batch if cu is None else cu.shape[0] - 1
        self.padded = triton.cdiv(self.tokens, TOGETHER) * TOGETHER
        self.padded_size = triton.next_power_of_2(self.size)
        slots = scan.processors(x.device) * (REGISTERS // config.registers) // self.warps(config)
        wanted = max(1, slots // (self.batch * self.blocks(config)))
        self.span = triton.cdiv(triton.cdiv(self.tokens, wanted), APART) * APART
        self.segments = triton.cdiv(self.tokens, self.span)
        self.faded = recorder.empty(self.size, self.width, dtype=torch.float32)
        self.both = recorder.empty(self.batch, self.padded // TOGETHER, 2, self.size, TOGETHER, dtype=torch.float32)
        recorder.launch(
            kernels.prepare, (triton.cdiv(self.padded, 64), 2 * self.batch, 1), (a, b, c, self.faded, self.both),
            (*b.stride(), *c.stride(), self.tokens, self.padded), num_warps=4,
            shape=kernels.Shape(self.width, self.size, self.padded_size, 64),
        )  # fmt: skip

    def warps(self, config: Config) -> int:
        """Warps of a program, fewer if there are few channels."""
        return min(config.warps, triton.next_power_of_2(triton.cdiv(self.width, 32 * config.channels)))

    def wide(self, config: Config) -> int:
        """Channels of a program."""
        return 32 * config.channels * self.warps(config)

    def blocks(self, config: Config) -> int:
        """Programs that together have all channels."""
        return triton.cdiv(self.width, self.wide(config))

    def boundaries(self, cu: Tensor | None, before: Tensor | None, after: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """Index of the sequence, from 1, at its first token, and at its last: two tensors [T], 0 elsewhere."""
        if cu is None:
            return None, None
        starts, stops = (self.recorder.zeros(self.tokens, dtype=torch.int32) for _ in range(2))
        self.recorder.launch(
            scan_kernels.boundaries, (self.sequences, 1, 1), (cu, before, starts, stops, after), (self.tokens,),
            D=self.width * self.size, empty=0.0, DB=256, num_warps=1,
        )  # fmt: skip
        return starts, stops

    def enter(
        self,
        x: Tensor,
        dt: Tensor,
        given: Tensor | None,
        starts: Tensor | None,
        stops: Tensor | None,
        states: Tensor,
        *,
        reverse: bool,
    ) -> None:
        """Write the states that enter the segments to ``states``."""
        left = total = None
        if self.segments > 1:
            left = self.recorder.empty(*states.shape, dtype=torch.float32)
            total = self.recorder.empty(self.batch, self.segments, self.width, dtype=torch.float32)
            walked = (x, dt, self.faded, self.both, given, starts, stops, left, total)
            self(kernels.ends, ENDS, walked, skipped=1, H=_held(self.size, HELD if starts is None else PACKED), REVERSE=reverse)
        grid = (triton.cdiv(self.width, 128) * self.size * self.batch, 1, 1)
        tensors = (left, total, self.faded, given if starts is None else None, states)
        constants = dict(D=self.width, N=self.size, DB=128, G=min(8, triton.next_power_of_2(self.segments)), REVERSE=reverse)
        self.recorder.launch(kernels.chain, grid, tensors, (self.segments,), **constants, num_warps=4)

    def __call__(self, kernel: Any, config: Config, tensors: launch.Tensors, *numbers: int, skipped: int = 0, **constants: Any) -> None:
        """Launch a program for each segment but the ``skipped``, each block of channels and each row of the batch."""
        grid = (self.blocks(config) * (self.segments - skipped) * self.batch, 1, 1)
        tiles, span = triton.cdiv(self.tokens, config.tokens), self.span // config.tokens
        numbers = (self.tokens, self.padded, tiles, span, self.segments, *numbers)
        constants.update(D=self.width, N=self.size, C=config.tokens, DB=self.wide(config))
        self.recorder.launch(kernel, grid, tensors, numbers, **constants, num_warps=self.warps(config), maxnreg=config.registers)


def gradients(*arguments: Tensor | None) -> launch.Tensors:
    """The results of :func:`backward` without memory."""
    return tuple([None if t is None else t.new_empty(t.shape) for t in arguments[:7]])
