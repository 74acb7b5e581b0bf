"""Forms in which transformers marks several sequences in one row, and their boundaries."""

from __future__ import annotations

from typing import Any, TypedDict

import torch
import torch.nn.functional as F
from torch import Tensor

from linattn.ops.checks import dtype, packed_lengths, shape, tensor, values_visible

PACKED = "cu_seq_lens_q"  # transformers' name for the boundaries of packed sequences


class Packing(TypedDict, total=False):
    """Keywords besides ``position_ids`` that transformers' collators give packed rows, ``DataCollatorWithFlattening`` first.

    ``cu_seq_lens_q`` and ``cu_seq_lens_k``, [N + 1] int, are ``cu_seqlens``; ``seq_idx`` [B, T] int numbers the sequence of each
    token. The ``max_length_q`` and ``max_length_k`` of FlashAttention are not used.
    """

    cu_seq_lens_q: Tensor | None
    cu_seq_lens_k: Tensor | None
    max_length_q: int | Tensor | None
    max_length_k: int | Tensor | None
    seq_idx: Tensor | None


ENDS = (PACKED, "cu_seq_lens_k")
PLACES = ("seq_idx", "position_ids")  # arguments with a number per token


def sequences(
    tokens: Tensor,
    *,
    mask: Tensor | None,
    cu_seqlens: Tensor | None,
    position_ids: Tensor | None,
    given: Packing,
    fresh: bool,
) -> tuple[str, Tensor | None]:
    """Find the boundaries ``cu_seqlens`` [N + 1] of all rows of ``tokens`` [B, T, ...] end to end, or None, after their argument's name.

    Several arguments are compared if that needs no synchronisation; otherwise the first one counts, and positions and indices,
    whose values must be read, come last.

    Raises:
        TypeError: for an unknown keyword, and for a value that is not a tensor.
        ValueError: for another shape or dtype, invalid ends, arguments that contradict each other, and ``shift_labels`` of context
            or sequence parallel training.
    """
    if "shift_labels" in given:  # each process would start its part of a row from an empty state
        raise ValueError("shift_labels belong to rows split over processes, which exchange no states here: give labels")
    for name in given:
        if name not in Packing.__annotations__:
            raise TypeError(f"forward() got an unexpected keyword argument {name!r}")
    given_packing: dict[str, Any] = {
        "cu_seqlens": cu_seqlens,
        **{name: given.get(name) for name in (*ENDS, "seq_idx")},
        "position_ids": position_ids,
    }
    by, cu = "", None
    for name, t in given_packing.items():
        if t is not None:
            (check_positions if name in PLACES else packed_lengths)(t, tokens, name)
    for name, t in given_packing.items():
        if t is None or not (cu is None or values_visible(cu)):
            continue
        again = _ends(name, t, tokens, mask)
        if cu is None:
            by, cu = name, again
        elif again is not None:
            _agree(by, cu, name, again, exactly=fresh or name != "position_ids")
    return by, cu


def _ends(name: str, t: Tensor, tokens: Tensor, mask: Tensor | None) -> Tensor | None:
    """Boundaries ``cu_seqlens`` [N + 1] given by the argument ``name``; None for positions that do not restart."""
    if name not in PLACES:
        return t
    if not t.shape[1]:
        return None
    t = t.expand(tokens.shape[0], -1)
    return restarts(breaks(t), mask) if name == "position_ids" else borders(t.diff() != 0)


def check_positions(t: Any, tokens: Tensor, name: str) -> None:
    """Check for one number per token of ``tokens`` [B, T, ...], or one row of them for all."""
    dtype(name, tensor(name, t, tokens), torch.int64, torch.int32)
    batch, length = tokens.shape[:2]
    shape(name, t, "[B, T]", *dict.fromkeys(((batch, length), (1, length))))


def _agree(name: str, cu: Tensor, other: str, again: Tensor, exactly: bool) -> None:
    """Raise ValueError for two contradicting arguments; if not ``exactly``, a continuing sequence may seem to restart by chance."""
    wanted, came = (sorted(set(t.tolist())) for t in (cu, again))  # without empty sequences, which some forms cannot express
    if wanted != came and (exactly or not set(came) <= set(wanted)):
        raise ValueError(f"{other} must begin sequences where {name} does, {wanted}, but begins them at {came}")


def breaks(positions: Tensor) -> Tensor:
    """Mask [B, T - 1], True where a position [B, T] is not the previous one plus 1, as in transformers' masks."""
    return positions.diff() != 1


def restarts(starts: Tensor, mask: Tensor | None) -> Tensor | None:
    """Compute :func:`borders` of positions that restart; None if none does, or beside padding, which has positions too.

    The number of sequences is known only from the values, which synchronises with a GPU.
    """
    if not starts.shape[1] or starts.device.type == "meta" or not bool(starts.any()) or (mask is not None and not bool(mask.all())):
        return None
    return borders(starts)


def borders(starts: Tensor) -> Tensor:
    """Boundaries ``cu_seqlens`` [N + 1] of rows put end to end; starts [B, T - 1] is True where the next token begins a sequence."""
    first = F.pad(starts, (1, 0), value=True).flatten()
    return F.pad(first.nonzero()[:, 0], (0, 1), value=first.shape[0])


def positions(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """Position [1, T] of each token in its own sequence."""
    token = torch.arange(tokens, device=cu_seqlens.device)
    return (token - cu_seqlens[torch.searchsorted(cu_seqlens[1:].contiguous(), token, right=True)])[None]
