"""Gradients of each segment's last chunks first, in whose memory the cotangents of the states before them come next: the same bits."""

import pytest
import torch

from linattn.ops.triton import hopper, launch, table
from linattn.ops.triton.run import Run
from tests.ops.cases import make
from tests.ops.errors import same_bits
from tests.ops.triton.device import INTERPRETED, first, gradients, here

# Rows of whole chunks and not; segments, the last one shorter; packed sequences.
WHOLE = dict(B=2, T=80, H=2) if INTERPRETED else dict(B=2, T=1024, H=64)
ROWS = dict(B=2, T=75, H=2) if INTERPRETED else dict(B=2, T=1000, H=64)
SEGMENTS = dict(B=1, T=304, H=2, Hk=1, initial=False) if INTERPRETED else dict(B=1, T=4032, H=4, Hk=2, initial=False)
PACKED = dict(lengths=(200, 0, 75), H=1) if INTERPRETED else dict(lengths=(3000, 0, 1001), H=2)
SIZE = dict(K=32, V=48) if INTERPRETED else dict(K=128, V=128)
CASES = [
    ("plain", "BTH", ROWS),
    ("beta", "none", WHOLE),
    ("beta", "BTH", ROWS),
    ("beta", "BTH", SEGMENTS),
    ("bonus", "BTH", SEGMENTS),
    ("beta", "BTH", PACKED),
]


@pytest.fixture
def scanned(monkeypatch):
    """Parts that are scanned, on any card."""
    found, backward = [], Run.backward
    monkeypatch.setattr(hopper, "_hopper", lambda device: False)
    monkeypatch.setattr(Run, "backward", lambda run, *given, **named: found.append(named.get("part")) or backward(run, *given, **named))
    launch._programs.clear()
    yield found
    launch._programs.clear()


@pytest.mark.parametrize(("kind", "rank", "shape"), first([CASES[1], *CASES[4:]], CASES), ids=str)
def test_parts_change_no_bits(kind, rank, shape, scanned, monkeypatch):
    if "lengths" not in shape and shape["B"] > 1:
        monkeypatch.setattr(table, "FEWEST", 99)  # a segment for each sequence
    call, found = here(make(kind, rank, **SIZE, **shape)).to(torch.bfloat16), []
    for parts in (1, 4):
        monkeypatch.setattr(table, "PARTS", (parts,) * 3)
        launch._programs.clear()
        scanned.clear()
        outputs = ("o",) if shape is WHOLE else None  # without a cotangent of the final state no memory is given for those between parts
        found += [gradients(call, outputs) for _ in range(1 if INTERPRETED else 2)]  # the second replays the first
        assert (len({part for part in scanned if part}) > 2) == (parts > 1)
    for other in found[1:]:
        for one, same in zip(found[0], other, strict=True):
            same_bits(one, same)
