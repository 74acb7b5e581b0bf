"""Patterns by torch's flex_attention, which skips blocks without visible pairs and stores no scores."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, reduce
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from linattn.ops import gpu
from linattn.ops.tiles import NOTHING

if TYPE_CHECKING:
    from linattn.ops.pattern import Part, Pattern

BLOCK = 128  # queries and keys of a block, the unit of skipping
LEAST_SIZE = 16  # channels of a head that the kernel needs


def serves(q: Tensor, v: Tensor) -> bool:
    """True if flex_attention computes the pattern for q [B, T, H, K] and v [B, T, H, V]."""
    small = min(q.shape[3], v.shape[3]) < LEAST_SIZE or q.shape[1] < BLOCK
    return q.is_cuda and gpu.refusal(q.device) is None and q.dtype != torch.float64 and not small


def attend(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, lengths: Tensor | None, scale: float) -> Tensor:
    """Compute :func:`linattn.ops.pattern.attend`: each part separately, with tokens in the order of its tiles, then combined."""
    outputs, logs = [], []
    for part in pattern.parts(q.shape[1], q.device):
        if not part.pairs:
            continue
        rows, columns = (_order(places, q.shape[1]) for places in (part.queries, part.keys))
        mask = block_mask(part, rows, columns, lengths)
        tiles = (t.index_select(1, order).transpose(1, 2) for t, order in ((q, rows), (k, columns), (v, columns)))
        o, aux = _run(q, part)(*tiles, block_mask=mask, scale=scale, return_aux=AuxRequest(lse=True))
        back = rows.argsort()
        outputs.append(o.transpose(1, 2).index_select(1, back))
        logs.append(aux.lse.transpose(1, 2).index_select(1, back))
    if len(outputs) < 2:
        return outputs[0] if outputs else torch.zeros_like(v)
    log = torch.stack(logs)  # [parts, B, T, H]
    weights = torch.where(log.isfinite(), log, NOTHING).softmax(0)[..., None]
    return (weights * torch.stack(outputs)).sum(0).to(v.dtype)


def block_mask(part: Part, rows: Tensor, columns: Tensor, lengths: Tensor | None) -> BlockMask:
    """Mask of the blocks that contain a pair of ``part``, for queries in the order ``rows`` [T] and keys in the order ``columns`` [T]."""
    length = rows.shape[0]
    touched = (_blocks(part.queries, rows).T @ _blocks(part.keys, columns)) > 0  # [T / BLOCK, T / BLOCK]
    counts, blocks = touched.sum(-1, dtype=torch.int32), touched.int().argsort(dim=-1, descending=True, stable=True).int()
    within, without, whole = part.within, part.without, rows.new_full((1,), length)

    def seen(b: Tensor, _: Tensor, i: Tensor, j: Tensor) -> Tensor:
        query, key, bound = rows[i], columns[j], whole[0] if lengths is None else lengths[b]
        return reduce(lambda rest, other: rest & ~other.sees(query, key, bound), without, within.sees(query, key, bound) & (key < bound))

    return BlockMask.from_kv_blocks(counts[None, None], blocks[None, None], BLOCK_SIZE=BLOCK, mask_mod=seen, seq_lengths=(length, length))


def _order(places: Tensor, length: int) -> Tensor:
    """Order tokens [T] by their first occurrence in ``places`` [G, C]; tokens that do not occur come last."""
    flat = places.flatten()
    first = flat.new_full((length + 1,), flat.shape[0])
    index = torch.where(flat < 0, length, flat)
    return first.scatter_reduce(0, index, torch.arange(flat.shape[0], device=flat.device), "amin")[:length].argsort(stable=True)


def _blocks(places: Tensor, order: Tensor) -> Tensor:
    """Blocks of the tokens in ``order`` [T] that each tile of ``places`` [G, C] reaches into, [G, blocks] of 0 and 1."""
    count = -(-order.shape[0] // BLOCK)
    block = torch.where(places < 0, count, order.argsort()[places.clamp(min=0)] // BLOCK)
    return torch.zeros(places.shape[0], count + 1, device=order.device).scatter(1, block, 1.0)[:, :count]


def _run(q: Tensor, part: Part) -> Callable:
    if not q.is_cuda or torch.compiler.is_compiling():
        return cast(Callable, flex_attention)
    return compiled(type(part.within), *map(type, part.without))


@cache
def compiled(*_kinds: type) -> Callable:
    """Compile a function for each kind of mask: torch recompiles a function at most 8 times, and then silently stores all pairs."""

    def attention(*args: Any, **options: Any) -> Any:
        return flex_attention(*args, **options)

    attention.__code__ = attention.__code__.replace()  # torch counts recompilations by code object
    return torch.compile(attention)
