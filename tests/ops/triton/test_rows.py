"""Rows of many tensors copied by one launch, against indexing."""

import pytest
import torch

from tests.ops.triton.device import DEVICE

pytest.importorskip("triton")

from linattn.ops.triton import rows

SHAPES = [((5, 3, 70), torch.float32), ((5,), torch.int64), ((5, 3, 4), torch.float16), ((5, 9000), torch.float32)]
ODD = [((5, 3), torch.float16), ((5, 7), torch.uint8)]


def made(shapes) -> tuple[list[torch.Tensor], list[int], int]:
    torch.manual_seed(0)
    tensors = [(100 * torch.rand(shape)).to(dtype).to(DEVICE) for shape, dtype in shapes]
    offsets, size = [], 0
    for t in tensors:
        offsets.append(size)
        size += -(-t[0].nbytes // 16) * 16
    return tensors, offsets, size


def parts(packed, tensors, offsets):
    return [packed[:, o : o + t[0].nbytes].contiguous().view(t.dtype).view(-1, *t.shape[1:]) for t, o in zip(tensors, offsets, strict=True)]


@pytest.mark.parametrize("shapes", [SHAPES, ODD], ids=["words", "odd"])
def test_rows_are_packed_unpacked_moved_and_cleared(shapes):
    tensors, offsets, size = made(shapes)
    before, table = [t.clone() for t in tensors], rows.Table(tensors, offsets)
    packed = torch.zeros(2, size, dtype=torch.uint8, device=DEVICE)
    table.pack(packed, 1)
    assert all(torch.equal(part, t[1:3]) for part, t in zip(parts(packed, tensors, offsets), before, strict=True))
    table.unpack(packed, 3)
    assert all(torch.equal(t[3:5], old[1:3]) and torch.equal(t[:3], old[:3]) for t, old in zip(tensors, before, strict=True))
    table.move(4, 0)
    assert all(torch.equal(t[0], old[2]) and not t[4].any() for t, old in zip(tensors, before, strict=True))
    table.clear(1)
    assert all(not t[1].any() and torch.equal(t[2:4], old[[2, 1]]) for t, old in zip(tensors, before, strict=True))


def test_one_packed_row_fills_many():
    tensors, offsets, size = made(SHAPES)
    before, table = [t.clone() for t in tensors], rows.Table(tensors, offsets)
    packed = torch.zeros(1, size, dtype=torch.uint8, device=DEVICE)
    table.pack(packed, 4)
    table.unpack(packed.expand(3, -1), 0)
    assert all(torch.equal(t[:3], old[[4, 4, 4]]) and torch.equal(t[3], old[3]) for t, old in zip(tensors, before, strict=True))
