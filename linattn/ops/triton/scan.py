"""Elementwise recurrences on a GPU: configurations and launches."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from linattn.ops import gpu, tracing
from linattn.ops.torch import scan as portable
from linattn.ops.triton import fitting, launch, table
from linattn.ops.triton import scan_kernels as kernels
from linattn.ops.triton.table import Elementwise as Config

SHORT = 8  # largest number of tokens of a call with one small tile: decoding
WIDTH = 64  # channels of a chain in the estimate of the number of chains
PROGRAMS = 32  # largest number of programs of a chain
REGISTERS = 65536 // 32  # registers of a multiprocessor, for each thread of a warp


def config(decay: Tensor, values: Tensor, cu_seqlens: Tensor | None, backward: bool) -> Config:
    batch, tokens, size = values.shape
    shared = decay.ndim > 1 and batch * -(-size // WIDTH) < processors(values.device)
    return table.elementwise(tokens <= SHORT, cu_seqlens is not None, shared, backward, decay.element_size(), values.element_size())


def processors(device: torch.device) -> int:
    return gpu.card(device).multiprocessors


def refusal(kind: str, decay: Tensor, x: Tensor, *_: Tensor | None) -> str | None:
    """Reason why the kernels do not run a call, or None if they do; on a GPU whose resources suffice every call runs."""
    passes = ("forward", "backward") if tracing.wanted(decay, x) else ("forward",)
    return fitting.refusal(*((each, *_name(kind, decay, x)) for each in passes))


def _name(kind: str, decay: Tensor, x: Tensor, *_: object) -> tuple[Hashable, ...]:
    return kind, x.device, decay.dtype, x.dtype, decay.ndim, x.shape[2:]


def _portable(kind: str, decay: Tensor, x: Tensor, initial: Tensor | None, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute :func:`forward` in operations of torch."""
    join = portable.decayed_sum if kind == "sum" else portable.decayed_max
    out, final = portable.whole(portable.scan, join, decay, x, initial, cu_seqlens, _nothing(kind))
    return out.to(x.dtype) if kind == "sum" else out, final


def _portable_backward(*arguments: Any) -> tuple[Tensor | None, ...]:
    """Compute :func:`backward` in operations of torch. For a sum x is recomputed from the states, which are passed in its place."""
    kind, decay, x, out, initial, cu_seqlens, d_out, d_final, of_decay = arguments

    def run(decay: Tensor, x: Tensor, initial: Tensor | None) -> tuple[Tensor, Tensor]:
        return _portable(kind, decay, x, initial, cu_seqlens)

    if kind == "sum":
        x = (out - decay.exp() * _before(out, initial, cu_seqlens)).to(x.dtype)
    d_decay, d_x, d_initial = fitting.differentiated(run, (decay, x, initial), (d_out, d_final))
    return d_decay if of_decay else None, d_x, d_initial


def _before(out: Tensor, initial: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
    """The state before each token, float32."""
    before = torch.nn.functional.pad(out.float(), (0, 0, 1, -1))
    if cu_seqlens is None:
        before[:, 0] = 0.0 if initial is None else initial
        return before
    there = cu_seqlens.diff() > 0
    before[0, cu_seqlens[:-1][there]] = 0.0 if initial is None else initial[there]
    return before


@fitting.or_else(_portable, lambda *arguments: ("forward", *_name(*arguments)))
def forward(kind: str, decay: Tensor, x: Tensor, initial: Tensor | None, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute :func:`linattn.ops.cpu.scan.forward`."""
    if not x.numel():
        out, final = outputs(kind, decay, x, initial, cu_seqlens)
        return out, final.fill_(_nothing(kind)) if initial is None else final.copy_(initial)
    out, final, *_ = launch.run(_forward, x, _contiguous(decay, x, initial, cu_seqlens), kind)
    return out, final


def _nothing(kind: str) -> float:
    return 0.0 if kind == "sum" else -torch.inf


def _contiguous(*tensors: Tensor | None) -> launch.Tensors:
    return tuple([t if t is None else t.contiguous() for t in tensors])


def outputs(kind: str, decay: Tensor, x: Tensor, initial: Tensor | None, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """The results of :func:`forward` without memory."""
    rows = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return x.new_empty(x.shape, dtype=x.dtype if kind == "sum" else torch.float32), x.new_empty((rows, x.shape[2]), dtype=torch.float32)


def _forward(recorder: launch.Recorder, decay: Tensor, x: Tensor, initial: Tensor | None, cu: Tensor | None, kind: str) -> launch.Tensors:
    """The states, and scratch memory that must be zeros."""
    work = _Launch(recorder, kind, decay, x, cu, backward=False)
    out = recorder.empty(*x.shape, dtype=x.dtype if kind == "sum" else torch.float32)
    final = recorder.empty(work.sequences, work.size, dtype=torch.float32)
    starts, ends = work.boundaries(cu, initial, final, _nothing(kind))
    words = work(kernels.forward, decay, x, initial, starts, ends, out, final)
    return out, final, starts, ends, words


@fitting.or_else(_portable_backward, lambda *arguments: ("backward", *_name(*arguments)))
def backward(
    kind: str, decay: Tensor, x: Tensor, out: Tensor, initial: Tensor | None, cu_seqlens: Tensor | None,
    d_out: Tensor, d_final: Tensor | None, of_decay: bool,
) -> tuple[Tensor | None, Tensor, Tensor | None]:  # fmt: skip
    """Gradients of decay (None unless ``of_decay``), of x and of the initial state (None without one)."""
    if not x.numel():
        d_initial = None if initial is None else torch.zeros_like(initial) if d_final is None else d_final.clone()
        return torch.zeros_like(decay) if of_decay else None, torch.empty_like(x), d_initial
    tensors = _contiguous(decay, x, out, initial, cu_seqlens, d_out, d_final)
    d_decay, d_x, d_initial, *_ = launch.run(_backward, x, tensors, kind, of_decay)
    if of_decay and decay.ndim == 1:
        d_decay = d_decay.sum(0).to(decay.dtype)
    return d_decay, d_x, d_initial


def _backward(recorder: launch.Recorder, *arguments: Any) -> launch.Tensors:
    """Gradients, with that of a constant decay in parts, and scratch memory that must be zeros."""
    decay, x, out, initial, cu, d_out, d_final, kind, of_decay = arguments
    work = _Launch(recorder, kind, decay, out, cu, backward=True)
    d_decay = recorder.empty(*work.shape_of_decay, dtype=work.dtype_of_decay) if of_decay else None
    d_x = recorder.empty(*x.shape, dtype=x.dtype)
    d_initial = None if initial is None else recorder.empty(*initial.shape, dtype=torch.float32)
    starts, ends = work.boundaries(cu, d_final, d_initial, 0.0)
    words = work(kernels.backward, decay, x, out, initial, d_out, d_final, starts, ends, d_decay, d_x, d_initial)
    return d_decay, d_x, d_initial, starts, ends, words


class _Launch:
    """Launch over the tiles of all rows and channels, with the flags by which its programs synchronize."""

    def __init__(self, recorder: launch.Recorder, kind: str, decay: Tensor, values: Tensor, cu: Tensor | None, *, backward: bool) -> None:
        self.recorder, self.kind, self.on_gpu = recorder, kind, gpu.capability(values.device) != gpu.INTERPRETER.capability
        self.config = c = config(decay, values, cu, backward)
        batch, self.tokens, self.size = values.shape
        self.sequences = batch if cu is None else cu.shape[0] - 1
        self.tiles = -(-self.tokens // (c.span * c.spans))
        per_row = -(-self.size // c.channels)
        self.chains = batch * per_row
        slots = processors(values.device) * c.programs if self.on_gpu else PROGRAMS * self.chains
        self.programs = max(1, min(slots // self.chains, self.tiles, PROGRAMS))
        if not self.on_gpu and self.programs < self.tiles:  # the interpreter runs programs sequentially
            self.programs = 1
        self.lanes = min(self.chains, slots)
        most = 1 if self.tokens <= SHORT else min(slots // per_row, PROGRAMS)  # independent of the batch
        self.words = 1 << (max(c.spans, most) - 1).bit_length()
        self.constant = decay.ndim == 1
        # The gradient of a constant decay is made of sums over each span of a batch row.
        self.shape_of_decay = (batch * self.tiles * c.spans, self.size) if self.constant else decay.shape
        self.dtype_of_decay = torch.float32 if self.constant else decay.dtype

    def boundaries(
        self, cu: Tensor | None, before: Tensor | None, after: Tensor | None, empty: float
    ) -> tuple[Tensor | None, Tensor | None]:
        """Index of the sequence, from 1, at its first token, and at its last: two tensors [T], 0 elsewhere."""
        if cu is None:
            return None, None
        starts, ends = (self.recorder.zeros(self.tokens, dtype=torch.int32) for _ in range(2))
        tensors = (cu, before, starts, ends, after)
        self.recorder.launch(
            kernels.boundaries, (self.sequences, 1, 1), tensors, (self.tokens,), D=self.size, empty=empty, DB=256, num_warps=1
        )
        return starts, ends

    def __call__(self, kernel: Any, *tensors: Tensor | None) -> Tensor:
        c = self.config
        words = self.recorder.zeros(0 if self.programs == 1 else self.tiles, self.chains * c.channels, dtype=torch.int64)
        decoding = self.tiles == 1 and self.lanes == self.chains
        options: dict[str, Any] = (
            {} if decoding or not self.on_gpu else {"launch_cooperative_grid": True}
        )  # all programs of a chain must run at the same time
        self.recorder.launch(
            kernel, (self.lanes * self.programs, 1, 1), (*tensors, words), (self.tokens, self.tiles, self.chains, self.programs),
            shape=kernels.Shape(self.size, self.kind, c.span, c.spans, c.channels, self.words, self.constant, c.stages), num_warps=c.spans,
            maxnreg=min(255, REGISTERS // (c.spans * c.programs) // 8 * 8), **options,
        )  # fmt: skip
        return words


def gradients(*arguments: Any) -> launch.Tensors:
    """The results of :func:`backward` without memory."""
    _, decay, x, _, initial, *_, of_decay = arguments
    return tuple([None if t is None else t.new_empty(t.shape) for t in (decay if of_decay else None, x, initial)])
