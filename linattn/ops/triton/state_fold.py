"""Fold of a row's segments into one, for the exchange of states with other processes that hold parts of the row."""

from __future__ import annotations

import triton
import triton.language as tl

from linattn.ops.triton.tiles import first_slot


@triton.jit(do_not_specialize=["sequences", "tokens", "sequences_before", "length"])
def fold(
    pieces, transition, total, folded, cu, sequences, tokens, heads, sequences_before, length,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BP: tl.constexpr, FADES: tl.constexpr, ERASES: tl.constexpr,
    REVERSE: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Fold all segments of each row into one, from an empty start (``REVERSE``: cotangents, from the last segment).

    If the row is ``PACKED``, fold the segments of its last sequence (``REVERSE``: its first).

    ``folded`` holds the states [N, H, K, V] end to end with, forwards, the links: [N, H, K], or [N, H, K, K] if the rule erases, which
    further blocks of columns compute.
    """
    n = (tl.program_id(1) + sequences_before).to(tl.int64)
    head = tl.program_id(2)
    begin = 0
    stop = tokens
    which = n
    if PACKED:
        which = n if REVERSE else n + sequences - 1
        begin = tl.load(cu + which).to(tl.int32)
        stop = tl.load(cu + which + 1).to(tl.int32)
    slot = first_slot(which, begin, tokens, length, PACKED)
    count = (stop - begin + length - 1) // length
    blocks = (V + BV - 1) // BV
    links = tl.program_id(0) >= blocks
    width = tl.where(links, K, V)
    channels = tl.arange(0, BK)
    columns = (tl.program_id(0) - tl.where(links, blocks, 0)) * BV + tl.arange(0, BV)
    there = (channels < K)[:, None] & (columns < width)[None, :]
    block = channels[:, None] * width + columns[None, :]
    first_link = tl.full((), K * V, tl.int64) * heads  # heads = 1 is a constant, not a tensor
    if not PACKED:
        first_link *= sequences
    here = folded + tl.where(links, first_link, 0) + (n * heads + head) * K * width
    at = (slot + (count - 1 if REVERSE else 0)) * heads + head
    s = tl.load(pieces + at * K * V + block, mask=there & (not links), other=0.0)
    if ERASES and not REVERSE:
        s += tl.load(transition + at * K * K + block, mask=there & links, other=0.0)
    fade = tl.full([BK], 1.0, tl.float32)
    if FADES and not ERASES and not REVERSE:
        fade = tl.load(total + at * K + channels, mask=channels < K, other=0.0)
    for i in range(1, count):
        at = (slot + (count - 1 - i if REVERSE else i)) * heads + head
        piece = tl.load(pieces + at * K * V + block, mask=there & (not links), other=0.0)
        if ERASES:
            tl.debug_barrier()  # the state is read in parts by other threads than wrote it
            tl.store(here + block, s, mask=there)
            tl.debug_barrier()
            s = piece
            for part in range(0, K, BP):
                inner = part + tl.arange(0, BP)
                if REVERSE:
                    square = inner[None, :] * K + channels[:, None]
                else:
                    square = channels[:, None] * K + inner[None, :]
                m = tl.load(transition + at * K * K + square, mask=(channels < K)[:, None] & (inner < K)[None, :], other=0.0)
                rows = (inner < K)[:, None] & (columns < width)[None, :]
                below = tl.load(here + inner[:, None] * width + columns[None, :], mask=rows, other=0.0)
                s = tl.dot(m, below, s, input_precision="tf32x3")
        else:
            if FADES:
                more = tl.load(total + at * K + channels, mask=channels < K, other=0.0)
                s *= more[:, None]
                fade *= more
            s += piece
    tl.debug_barrier()
    tl.store(here + block, s, mask=there)
    if not ERASES and not REVERSE:
        if tl.program_id(0) == 0:
            tl.store(folded + first_link + (n * heads + head) * K + channels, fade, mask=channels < K)
