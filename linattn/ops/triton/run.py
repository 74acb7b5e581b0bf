"""Launches of the kernels of a call of the recurrence on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from linattn.ops.triton import gradients as gradients_kernel
from linattn.ops.triton import hopper, state_fold, state_scan, table
from linattn.ops.triton import prepare as prepare_kernel
from linattn.ops.triton import unsettled as unsettled_kernel
from linattn.ops.triton.arguments import Gradients, strides
from linattn.ops.triton.call import Call
from linattn.ops.triton.fitting import Tiles, registers
from linattn.ops.triton.hopper import choice
from linattn.ops.triton.launch import UNFUSED, Tensors
from linattn.ops.triton.plan import ALL, CHANNEL, DELTA, ERASE, HEAD, KEY, NONE, PLAIN, QUERY, READ, WRITE, power_of_two

UNSETTLED = 64  # most channels at once where decays exceed the range of one product: more spill registers
ANCHORS = (1, 2, 0)  # of chunks with a decay per channel, in the order of their cost; 0: as tiles.py says, for any decays
LEFT = 8  # programs for each multiprocessor that look for what earlier launches leave: so many that they are about equally busy
ROLES = {PLAIN: (QUERY, KEY), DELTA: (QUERY, READ, KEY), ERASE: (QUERY, READ, KEY, WRITE)}
MOST = 65535  # most programs along the second dimension of a grid


class Run(Call):
    """The kernels of a call, each with its launch."""

    def prepare(self, spare: Tensor | None = None, kept: Sequence[Tensor | None] = (None,) * 6, ddecay: bool | None = None) -> None:
        """Compute the parts of the chunks that do not depend on the state: see prepare.py.

        A chunk of ``spare`` [B, T, H, ...] is written after the last use of the chunk's parts, so that its memory may hold some of them.
        ``kept`` is what an earlier call :attr:`prepared`, which is taken instead if this call has it in the same form. With ``ddecay``,
        which a backward pass knows, decayed queries are left out if nothing there reads them.
        """
        if not self.family.prepared:
            return
        fused = ddecay is not None and self.fuses(ddecay)
        in_rows = kept[1] is None
        if kept[0] is not None and (fused if self.family.decay == CHANNEL else in_rows == self.rowwise):
            self.p, self.b, self.fade, self.settled, self.k_faded, self.q_faded = kept
            self.b = self.p if self.rowwise else self.b
            return
        p, rule, by_channel = self.plan, self.family.rule, self.family.decay == CHANNEL
        square, wide = (p.chunks, self.heads, p.chunk, p.chunk), (p.chunks, self.heads, p.chunk, self.size_k)
        if self.rowwise:
            shape = (*self.own, 2 * p.chunk)
            fits = spare is not None and spare.shape == shape and spare.dtype == self.dtype
            self.p = self.b = spare if fits else self.empty(*shape)
        else:
            self.p = self.empty(*square)
            self.b = self.empty(*square) if rule != PLAIN else None
        if rule == ERASE or (rule == DELTA and by_channel):  # else the scans use the keys in place of W
            self.w = self.empty(*wide)
        if rule == ERASE:
            self.p_write, self.t = self.empty(*square), self.empty(*square)
        if by_channel:
            self.q_faded = None if fused and not self.local else self.empty(*wide)
            self.k_faded = self.empty(*wide)
            self.write_faded = self.empty(*wide) if rule == ERASE else None
            self.fade = self.empty(p.chunks, self.heads, self.size_k, dtype=torch.float32)
        elif rule == DELTA and self.family.decay == HEAD and (p.split or not self.fast):
            each = () if self.fast else (2 * p.chunk + 2,)  # bounds, see hopper/common.py: reach; or factors and bounds, see decays.py
            self.fade = self.empty(p.chunks, self.heads, *each, dtype=torch.float32)
        kernel, options = prepare_kernel.prepare, None
        if self.fast:
            kernel, options = choice.prepare(self.family, self.decay, self.read, self.write) or (kernel, None)
        tensors = (
            self.q, self.k, self.v, self.read, self.write, self.decay, self.beta, self.bonus, self.cu,
            self.p, self.p_write, self.b, self.t, self.w, self.q_faded, self.k_faded, self.write_faded, self.fade,
        )  # fmt: skip
        numbers = (*strides(self.q, self.k, self.read, self.write, self.decay, self.beta), *self.numbers)
        grid = (p.chunks, self.heads, 1)
        if options is not None:
            if by_channel:
                self.settled = self.empty(p.chunks, self.heads, -(-self.size_k // 64), dtype=torch.int32)
            self.recorder.launch(kernel, grid, (*tensors, self.settled), numbers, **options, **self.constants)
            return
        c = table.prepare(self.family, self.card)
        done = self.empty(p.chunks, self.heads, dtype=torch.int32) if by_channel else None
        for anchors in ANCHORS if by_channel else (1,):
            bk = min(c.bk if anchors else min(c.bk, UNSETTLED), power_of_two(self.size_k, self.least))
            self.recorder.launch(
                kernel, grid if anchors == 1 else self._few(p.chunks * self.heads), (*tensors, done), numbers,
                tiles=Tiles({"BK": self.narrowest}),
                BK=bk, ANCHORS=anchors, num_warps=c.warps, num_stages=c.stages, **self.constants,
            )  # fmt: skip

    def forward(
        self,
        starts: Tensor | None,
        o: Tensor | None = None,
        values: Tensor | None = None,
        states: Tensor | None = None,
        final: Tensor | None = None,
        early: Tensor | None = None,
        transition: Tensor | None = None,
        total: Tensor | None = None,
        *,
        local: bool = False,
        every: bool = False,
    ) -> None:
        if self.fast:
            kernel, options = choice.forward(
                self.family, self.size_k, self.size_v, o is not None, states is not None, transition is not None
            )
        else:
            c = table.forward(self.family, self.size_k, o is not None, self.card)
            kernel, options = state_scan.forward, self._in_blocks(c)
        self._launch_over(
            kernel, (self._blocks(options["BV"], transition), self.plan.segments, self.heads), transition,
            (
                self.q, self.k, self.v, self.write, self.decay, self.cu, self.p, self.p_write, self.b, self.w,
                self.q_faded, self.k_faded, self.write_faded, self.fade, starts, o if early is None else early, values, states, final,
                transition, total,
            ),
            (*strides(self.q, self.k, self.v, self.write, self.decay), *self.numbers), (self.plan.length,),
            V=self.size_v, BK=power_of_two(self.size_k, self.least), LOCAL=local, EVERY=every,
            OUTPUT=o is not None, KEEP=states is not None, START=starts is not None and not local, TURNED=self.turned,
            FINAL=final is not None, **options, **self.constants,
        )  # fmt: skip

    def backward(
        self,
        do: Tensor,
        ends: Tensor | None,
        dv: Tensor | None = None,
        x_read: Tensor | None = None,
        dstates: Tensor | None = None,
        dinitial: Tensor | None = None,
        *,
        local: bool = False,
        every: bool = False,
        part: tuple[int, int] = (0, 0),
    ) -> None:
        """Scan the state's cotangent; of each segment the chunks of ``part``, the first of them and their number, 0 for all.

        The scan of a part takes from that of the part after it the cotangents between them, which lie in ``ends``, or in ``dinitial`` if
        every sequence is one segment: then ``ends`` is an argument of the call, or None.
        """
        start, size = part
        between = None
        if size:
            later = start + size < self.plan.length // self.plan.chunk  # a part was scanned before this one
            owned = ends if self.plan.split else dinitial
            ends, between = owned if later else ends, owned if start else None
        if self.fast:
            kernel, options = choice.backward(self.family, self.size_k, self.size_v, local, dstates is not None)
            after: tuple[int, ...] = (self.plan.length,)
        else:
            c = table.backward(self.family, self.size_k, not local, self.card)
            kernel, options = state_scan.backward, {**self._in_blocks(c), "IN_PARTS": size > 0}
            after = (self.plan.length, start, size)
        self._launch_over(
            kernel, (self._blocks(options["BV"]), self.plan.segments, self.heads), None,
            (
                self.q, self.k, self.write, do, self.decay, self.cu, self.p, self.p_write, self.b, self.t, self.w,
                self.q_faded, self.k_faded, self.write_faded, self.fade, ends, dv, x_read, dstates, dinitial,
                *(() if self.fast else (between,)),
            ),
            (*strides(self.q, self.k, do, self.write, self.decay), *self.numbers), after,
            V=self.size_v, BK=power_of_two(self.size_k, self.least), LOCAL=local, START=ends is not None, TURNED=self.turned,
            EVERY=every, **options, **self.constants,
        )  # fmt: skip

    def _in_blocks(self, c: table.Config) -> dict[str, int]:
        """Options of a scan's launch."""
        bv = min(c.bv, power_of_two(self.size_v, self.least))
        return dict(BV=bv, num_warps=c.warps, num_stages=c.stages, **registers(c.warps))

    def _blocks(self, columns: int, transition: Tensor | None = None) -> int:
        """Number of programs that share the columns of a state, and of the transition if there is one."""
        return -(-self.size_v // columns) + (0 if transition is None else -(-self.size_k // columns))

    def _launch_over(
        self,
        kernel: Any,
        grid: tuple[int, int, int],
        transition: Tensor | None,
        tensors: Tensors,
        before: tuple[int | float, ...],
        after: tuple[int | float, ...],
        **constants: Any,
    ) -> None:
        """Launch over segments or sequences, in parts if they exceed a grid, with the numbers ``before``, first of the part, ``after``."""
        blocks, count, heads = grid
        joins = kernel is state_scan.chain or kernel is state_fold.fold  # which multiply float32
        halves = joins or not self.fast  # the kernels for Hopper have fixed tiles
        least = 16 if joins else self.narrowest
        for first in range(0, count, MOST):
            rest = (min(MOST, count - first), heads)
            tiles = Tiles({"BV": least}, partial(self._grid, rest, transition)) if halves else None
            self.recorder.launch(kernel, (blocks, *rest), tensors, (*before, first, *after), tiles=tiles, **constants)

    def _grid(self, rest: tuple[int, int], transition: Tensor | None, constants: dict[str, int]) -> tuple[int, int, int]:
        return (self._blocks(constants["BV"], transition), *rest)

    def chain(self, pieces: Tensor, transition: Tensor | None, total: Tensor | None, first: Tensor | None, *, reverse: bool) -> None:
        blocks = self._joins()
        blocks["BP"] = blocks["BK"] if blocks["BK"] <= 128 else 8192 // blocks["BK"]  # one product with a link where it fits
        self._launch_over(
            state_scan.chain, (self._blocks(blocks["BV"]), self.sequences, self.heads), None,
            (pieces, transition, total, first, None, self.cu), (self.sequences, self.tokens, self.heads), (self.plan.length,),
            REVERSE=reverse, FROM=first is not None, PACKED=self.cu is not None, **blocks,
        )  # fmt: skip

    def fold(self, pieces: Tensor, transition: Tensor | None, total: Tensor | None, folded: Tensor, *, reverse: bool) -> None:
        """Fold the segments of each row into ``folded``: states and, forwards, links; before :meth:`chain`, which replaces ``pieces``.

        Of a packed row, those of its last sequence; in ``reverse``, of its first.
        """
        blocks, linked = self._joins(), None if reverse else transition
        self._launch_over(
            state_fold.fold, (self._blocks(blocks["BV"], linked), self.batch, self.heads), linked,
            (pieces, transition, total, folded, self.cu), (self.sequences, self.tokens, self.heads), (self.plan.length,),
            REVERSE=reverse, PACKED=self.cu is not None, **blocks,
        )  # fmt: skip

    def _joins(self) -> dict[str, Any]:
        """Options of the kernels that join segments."""
        bk, erases = power_of_two(self.size_k, self.least), self.family.rule != PLAIN
        return dict(
            K=self.size_k, V=self.size_v, BK=bk, BV=min(32 if erases and bk <= 128 else 16 if erases else 64, power_of_two(self.size_v)),
            BP=min(64, 8192 // bk, bk), FADES=self.family.decay != NONE, ERASES=erases,
            num_warps=8 if bk > 64 else 4, num_stages=table.chain(erases, self.card).stages,
        )  # fmt: skip

    def gradients(
        self, do: Tensor, kept: Tensors, ddecay: bool, dk: Tensor | None = None, scan: Tensors | None = None,
        of_part: Callable[..., None] | None = None,
    ) -> Gradients:  # fmt: skip
        """Compute the gradients; ``kept`` are the scans' results: values and states with their cotangents.

        With ``scan``, the cotangents after the segments and memory for the gradients of v and of the initial state, the cotangents of the
        states are not known yet: the kernel that scans them takes the place of the first one, and ``kept`` has memory for them.

        With ``of_part`` they are not known either: it scans those of one part of every segment, see :meth:`Call.part`.

        The kernels for Hopper treat a head with many values as several heads that share all but the values, and their results are summed.
        """
        columns, chosen = min(self.size_v, hopper.WIDEST), (self.q, self.k, self.v, self.read, self.write, do, self.decay)
        fast = choice.gradients(self.family, self.plan.chunk, columns, *chosen) if self.fast else None
        if fast is None:
            columns = self.size_v
        split = self.size_v // columns  # heads that one head is treated as
        heads, group = self.heads * split, self.group * split
        to = self._allocate(heads, ddecay, kept[0] if self.in_place and self.size_k == self.size_v else None, dk)
        spans = -(-self.size_k // self._span()) if fast is None and ddecay and self.family.decay == HEAD else 1
        if spans > 1:
            to = to._replace(decay=self.empty(self.batch, self.tokens, heads * spans, dtype=torch.float32))
        tensors = (
            self.q, self.k, self.v, self.read, self.write, self.decay, self.beta, self.bonus, do, self.cu,
            *kept, to.q, to.k, to.read, to.write, to.decay, to.beta, to.bonus,
        )  # fmt: skip
        q_and_k, others = strides(self.q, self.k), strides(self.read, self.write, self.decay, self.beta)
        v_and_do = [(self.v.stride(1), self.v.stride(2) // split), (do.stride(1), do.stride(2) // split)]
        sequences, tokens, _, _, scale = self.numbers
        numbers = (*q_and_k, *v_and_do[0], *others, *v_and_do[1], sequences, tokens, heads, group, scale, 0)
        constants = dict(V=columns, DDECAY=ddecay, **self.constants)
        if of_part is not None:
            size = self.part(ddecay)
            for start in reversed(range(0, self.plan.length // self.plan.chunk, size)):
                of_part(part=(start, size))
                self._portable_gradients(tensors, (*numbers[:-1], start), heads, constants, size)
            return self._summed(to, 1, spans)
        if fast is None:
            self._portable_gradients(tensors, numbers, heads, constants)
            return self._summed(to, 1, spans)
        kernel, options = fast
        chunks = self.plan.chunks * heads
        programs = min(options.pop("programs", 1) * choice.multiprocessors(self.v.device), chunks)
        given, constants["SPLIT"] = (*tensors, self.settled), split
        if scan is None:
            self.recorder.launch(kernel, (programs, 1, 1), given, numbers, **options, **constants)
        else:
            given = (*tensors, self._fused_channel(do, kept, to, scan))
        for kernel, options, programs in choice.unsettled(self.family, self.v.device):
            grid = (min(programs, chunks * -(-self.size_k // 64)), 1, 1)
            self.recorder.launch(kernel, grid, given, numbers, **options, **constants)
        return self._summed(to, split)

    def fused(self, do: Tensor, ends: Tensor | None, kept: Tensors, dinitial: Tensor, ddecay: bool, dk: Tensor | None) -> Gradients:
        """Scan the state's cotangent and compute the gradients; ``kept`` are values, states, and the gradient of the values."""
        values, states, dv = kept
        if self.family.decay == CHANNEL:
            dstates = self.empty(self.plan.chunks, *self.state)
            return self.gradients(do, (None, None, states, dstates), ddecay, dk, (ends, dv, dinitial))
        to = self._allocate(self.heads, ddecay, values, dk)
        kernel, options = choice.fused()
        self.recorder.launch(
            kernel, (self.plan.segments, self.heads, 1),
            (
                self.q, self.k, self.v, do, self.decay, self.beta, self.cu, self.p, values, states, ends, dv,
                to.q, to.k, to.decay, to.beta, dinitial,
            ),
            (*strides(self.q, self.k, self.v, do, self.decay, self.beta), *self.numbers, self.plan.length),
            **{name: self.constants[name] for name in ("K", "DECAY", "RULE", "PACKED", "BITS")}, V=self.size_v, START=ends is not None,
            IN_ROWS=self.aligned, **options,
        )  # fmt: skip
        return self._summed(to, 1)

    def _fused_channel(self, do: Tensor, kept: Tensors, to: Gradients, scan: Tensors) -> Tensor:
        """Scan the state's cotangent with a decay per channel and compute the gradients of chunks that settle; returns marks of them."""
        (ends, dv, dinitial), (states, dstates) = scan, kept[2:]
        kernel, options = choice.fused_channel()
        marks = self.empty(self.plan.chunks, self.heads, self.size_k // 64, dtype=torch.int32)
        self.recorder.launch(
            kernel, (self.plan.segments, self.heads, 1),
            (
                self.q, self.k, self.v, do, self.decay, self.cu, self.p, self.fade, self.settled, states,
                dinitial if ends is None else ends, dv, to.q, to.k, to.decay, dstates, marks, dinitial,
            ),
            (*strides(self.q, self.k, self.v, do, self.decay), *self.numbers, self.plan.length, 0 if ends is None else self.size_k),
            K=self.size_k, V=self.size_v, PACKED=self.constants["PACKED"], **options,
        )  # fmt: skip
        return marks

    def _portable_gradients(
        self, tensors: Tensors, numbers: tuple[int | float, ...], heads: int, constants: dict[str, object], part: int = 0
    ) -> None:  # fmt: skip
        """Launch the kernels for all devices; with a decay per channel each launch computes the blocks that those before it leave.

        Where tokens have several roles with decays per channel, one launch of all would spill many registers: each role has its own.
        ``part`` is the number of chunks of each segment, 0 for all, from the last of ``numbers`` on.
        """
        by_channel, unit = self.family.decay == CHANNEL, 16
        done = self.empty(self.plan.chunks, heads, -(-self.size_k // unit), dtype=torch.int32) if by_channel else None
        together = self.family.decay == HEAD and constants["DDECAY"]  # the gradient of a decay per head is a sum over channels

        def grid(anchors: int, sizes: dict[str, int]) -> tuple[int, int, int]:
            blocks = -(-self.size_k // (self._span() if together else sizes["BK"]))
            each = (self.plan.segments * part or self.plan.chunks) * blocks, heads, 1
            return each if anchors == 1 else self._few(prod(each))

        apart = by_channel and (self.family.rule != PLAIN or self.family.before)
        roles = ROLES[self.family.rule] if apart else (ALL,)
        so_far = self.empty(*self.own[:2], heads, self.size_k, dtype=torch.float32) if apart and constants["DDECAY"] else None
        for anchors, role in [(a, role) for a in (ANCHORS if by_channel else (1,)) for role in (roles if a else (ALL,))]:
            kernel = gradients_kernel.gradients if anchors else unsettled_kernel.unsettled
            c = (table.unsettled, table.gradients, table.two_anchors)[anchors](self.family, self.card)
            blocks = {"BK": min(c.bk, power_of_two(self.size_k, self.least)), "BV": min(c.bv, power_of_two(self.size_v, self.least))}
            most = registers(c.warps) if c.warps > 8 else {}  # with 8, ptxas does not limit these
            more = (self.plan.length, part) if anchors else ()
            if anchors:
                most |= {"SPAN": self._span(), "ANCHORS": anchors, "ROLE": role, "IN_PARTS": part > 0}
            self.recorder.launch(
                kernel, grid(anchors, blocks), (*tensors, so_far, done), (*numbers, *more),
                tiles=Tiles(dict.fromkeys(("BV", "BK"), self.narrowest), partial(grid, anchors)),
                num_warps=c.warps, num_stages=c.stages, **UNFUSED, UNIT=unit, **blocks, **most, **constants,
            )  # fmt: skip

    def _few(self, items: int) -> tuple[int, int, int]:
        """Grid of a launch that computes those of ``items`` that earlier ones leave."""
        return min(LEFT * self.card.multiprocessors, items), 1, 1

    def _span(self) -> int:
        """Channels of a program of the portable gradients with a decay per head: one block, before it is halved where it does not fit."""
        return min(table.gradients(self.family, self.card).bk, power_of_two(self.size_k, self.least))

    def _allocate(self, heads: int, ddecay: bool, q: Tensor | None = None, k: Tensor | None = None) -> Gradients:
        """Allocate the gradients for a number of heads; those of q and k unless they are given."""
        q, k = (self.empty(self.batch, self.tokens, heads, self.size_k, dtype=self.v.dtype) if t is None else t for t in (q, k))
        of_heads = (self.decay if ddecay else None, self.beta, self.read, self.write)
        decay, beta, read, write = (None if t is None else self.empty(*t.shape[:2], heads, *t.shape[3:], dtype=t.dtype) for t in of_heads)
        bonus = None if self.bonus is None else self.recorder.zeros(self.plan.chunks, heads, self.size_k, dtype=torch.float32)
        return Gradients(q, k, decay, beta, read, write, bonus)

    def _summed(self, each: Gradients, split: int, spans: int = 1) -> Gradients:
        """Sum the gradients of tensors that heads share: queries and keys over all heads of a group, the rest over ``split``.

        The gradient of a decay per head [B, T, H · spans] has a part of each of ``spans`` of channels.
        """
        q, k = (self._sum(t, self.group * split) for t in each[:2])
        beta, read, write = (None if t is None else self._sum(t, split) for t in each[3:6])
        given, decay = self.decay, each.decay
        if decay is not None and given is not None:
            decay = self._sum(decay, split * spans, given.dtype)
        return Gradients(q, k, decay, beta, read, write, each.bonus)

    def _sum(self, each: Tensor, group: int, dtype: torch.dtype | None = None) -> Tensor:
        """Sums over each ``group`` of heads of ``each`` [B, T, H] or [B, T, H, K]."""
        if group == 1:
            return each
        batch, tokens, heads, *rest = each.shape
        total = self.empty(batch, tokens, heads // group, *rest, dtype=dtype or each.dtype)
        size = rest[0] if rest else 1
        rows, bk = batch * tokens * heads // group, power_of_two(size)
        at_once = max(1, 4096 // bk)  # rows per program
        self.recorder.launch(
            gradients_kernel.shared, (-(-rows // at_once), 1, 1), (each, total), (rows,),
            GROUP=group, K=size, BK=bk, ROWS=at_once, num_warps=4,
        )  # fmt: skip
        return total
