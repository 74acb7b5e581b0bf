"""Tensors of a recorded call share memory, but never while both are in use."""

from __future__ import annotations

import random

import pytest
import torch

from linattn.ops.triton import chunks, hopper
from linattn.ops.triton.hopper import choice
from linattn.ops.triton.record import Life, Place, Program, Recorder, placed
from tests.ops import cases
from tests.targets.cards import CARDS
from tests.targets.machine import Machine

KB = 1024


def test_what_no_launch_uses_together_shares_memory():
    tensors = [(4 * KB, Life(0, 1)), (2 * KB, Life(2, 3)), (2 * KB, Life(3, 3))]
    assert placed(tensors, []) == [Place(None, 0), Place(None, 0), Place(None, 2 * KB)]


def test_results_hold_what_is_used_before_them():
    tensors = [(2 * KB, Life(0, 1)), (2 * KB, Life(0, 1)), (2 * KB, Life(0, 2)), (8 * KB, Life(0, 1))]
    found = placed(tensors, [(4 * KB, 2)])
    assert found[:2] == [Place(0, 0), Place(0, 2 * KB)]  # fills it
    assert found[2].host is None  # still used when the result is written
    assert found[3].host is None  # too large


def test_nothing_in_use_overlaps():
    chance = random.Random(0)
    for _ in range(300):
        lives = [sorted(chance.randrange(6) for _ in range(2)) for _ in range(12)]
        tensors = [(KB * chance.randrange(1, 9), Life(*life)) for life in lives]
        hosts = [(KB * chance.randrange(1, 12), chance.randrange(7)) for _ in range(3)]
        found = placed(tensors, hosts)
        for i, ((size, life), place) in enumerate(zip(tensors, found, strict=True)):
            if place.host is not None:
                most, until = hosts[place.host]
                assert place.offset + size <= most and life.last < until
            for (other_size, other), there in list(zip(tensors, found, strict=True))[:i]:
                if there.host == place.host and other.first <= life.last and life.first <= other.last:
                    assert place.offset + size <= there.offset or there.offset + other_size <= place.offset


@pytest.mark.parametrize(
    ("kind", "rank", "most"),
    [
        ("beta", "BTH", 4.6),
        ("beta", "none", 4.6),
        ("plain", "BTH", 2.6),
        ("plain", "BTHK", 4.1),
        ("beta", "BTHK", 6.6),
        ("erase", "BTHK", 7.6),
    ],
)
def test_what_a_backward_pass_needs_on_a_hopper_beside_its_results(kind, rank, most, monkeypatch):
    """In tensors of the size of q: the states before chunks are two, and so are their cotangents, half of one those of segments."""
    monkeypatch.setitem(hopper._gluon_refusals, torch.device("cpu"), None)
    monkeypatch.setattr(choice, "multiprocessors", lambda device: 1)
    call = cases.make(kind, rank, B=1, T=4096, H=2, K=128, V=128, initial=False).to(torch.bfloat16, torch.bfloat16)
    t = call.tensors
    given = (t["q"], t["k"], t["v"], t.get("decay"), t.get("beta"), t.get("read"), t.get("write"), None, None, None)
    with Machine(CARDS["sm_90"], wanted="no module")():
        starts = chunks._forward(Recorder(t["v"], given), *given, 1.0, False, True)[2:]
        recorder = Recorder(t["v"], (*given, t["v"], *starts))
        results = chunks._backward(recorder, *given, t["v"], None, *starts, 1.0, "decay" in t)
    assert Program(recorder, results).bytes <= most * t["q"].nbytes
