"""Checks of sequence mixers whose tokens read all of their sequence: padding, packing, no state."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.conformance.checks.engines import assert_compiled
from tests.conformance.tools import TOKENS, WIDTH, Make, assert_bits, assert_same, build, graded, tokens


def check_padding(make: Make) -> None:
    """Padding before, after and between the tokens, all of a row or none of it, does not change the real ones."""
    mixer = build(make)
    mask = torch.tensor(
        [[0, 0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0, 0], [0, 1, 1, 0, 0, 1, 0], [0, 0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1, 1]]
    ).bool()
    x = tokens(*mask.shape)

    def padded(x: Tensor) -> Tensor:
        return mixer(x, mask=mask)[mask]

    def alone(x: Tensor) -> Tensor:
        return torch.cat([mixer(row[real][None])[0] for row, real in zip(x, mask, strict=True)])

    assert_same(graded(mixer, padded, x), graded(mixer, alone, x), "padded")
    y = mixer(x, mask=mask)
    assert_bits(mixer(torch.where(mask[..., None], x, torch.nan), mask=mask), y, "other padding")
    assert not y[~mask].any(), "the output of padding is 0"


def check_packed(make: Make) -> None:
    """Sequences packed end to end, empty ones among them, equal separate calls; another one's NaN changes no bit."""
    mixer, lengths = build(make), [0, 66, 1, 0, 6, 0]  # one longer than a chunk
    cu = torch.tensor([0, *lengths]).cumsum(0)
    x = tokens(1, sum(lengths))

    def packed(x: Tensor) -> Tensor:
        return mixer(x, cu_seqlens=cu)

    def alone(x: Tensor) -> Tensor:
        return torch.cat([mixer(part) for part in x.split(lengths, 1)], 1)

    assert_same(graded(mixer, packed, x), graded(mixer, alone, x), "packed")
    assert_bits(mixer(x, cu_seqlens=cu.int()), packed(x), "cu_seqlens of 32 bits")
    poisoned = x.clone()
    poisoned[:, 3] = torch.nan
    assert_bits(packed(poisoned)[:, 66:], packed(x)[:, 66:], "a sequence beside one with NaN")


def check_no_state(make: Make) -> None:
    """A state, asked for or given, is refused: the output of a token depends on those that come later."""
    mixer, x = build(make), tokens(2, TOKENS)
    with pytest.raises(ValueError, match="no state"):
        mixer(x, return_state=True)
    with pytest.raises(ValueError, match="no state"):
        mixer(x, {"position": torch.zeros(2, dtype=torch.int64)})


def check_compile(make: Make) -> None:
    """``torch.compile(fullgraph=True)`` supports padding."""
    mixer, x = build(make), tokens(2, 4)
    assert_compiled(lambda x, mask: [mixer(x, mask=mask)], x, torch.tensor([[0, 1, 0, 1], [1, 1, 1, 0]]).bool())


def check_compile_layouts(make: Make) -> None:
    """``torch.compile(fullgraph=True)`` supports every layout: a batch, padding, packed sequences."""
    mixer, x = build(make), tokens(2, 4)
    mask, cu = torch.tensor([[0, 1, 0, 1], [1, 1, 1, 0]]).bool(), torch.tensor([0, 0, 8])

    def every(x: Tensor, mask: Tensor, cu: Tensor) -> list[Tensor]:
        return [mixer(x), mixer(x, mask=mask), mixer(x.reshape(1, -1, WIDTH), cu_seqlens=cu)]

    assert_compiled(every, x, mask, cu)
