"""Tensors of a recorded call alias each other only if not live at the same time."""

from __future__ import annotations

import random

import pytest
import torch

from linattn.ops.triton import chunks, hopper, table
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
        ("beta", "BTH", 0.6),
        ("beta", "none", 0.6),
        ("plain", "BTH", 2.6),
        ("plain", "BTHK", 5.1),
        ("beta", "BTHK", 6.6),
        ("erase", "BTHK", 7.6),
    ],
)
def test_what_a_backward_pass_needs_on_a_hopper_beside_its_results(kind, rank, most, monkeypatch):
    """In tensors of the size of q: two for the states before chunks, two for their cotangents, half of one for those of segments.

    Delta rules without decays per channel need only the last: states alias the gradients of k and v, and no cotangents are stored. The
    plain rule with decays per channel needs half of one more for P, which one kernel reads while it writes the gradients.
    """
    program, saved, names, q = backward_on_a_hopper(kind, rank, monkeypatch)
    assert program.bytes <= most * q.nbytes
    assert ("prepare" in names) == (rank == "BTHK" and kind != "plain")
    kept = [None if t is None else t.nbytes for t in saved[2:]]
    decays = 4 * 64 * 2  # bytes: a number for each of 64 chunks of two heads
    wanted = {
        ("beta", "BTH"): [q.nbytes, None, decays, None, None, None],
        ("beta", "none"): [q.nbytes, None, None, None, None, None],
        ("plain", "BTHK"): [q.nbytes // 2, None, 128 * decays, 2 * decays, q.nbytes, q.nbytes],
    }
    assert kept == wanted.get((kind, rank), [None] * 6)


def test_decayed_queries_are_kept_only_for_ends_of_segments(monkeypatch):
    _, saved, names, q = backward_on_a_hopper("plain", "BTHK", monkeypatch, heads=132, tokens=128)
    assert saved[6].nbytes == q.nbytes and saved[7] is None and "prepare" not in names


@pytest.mark.parametrize(
    ("kind", "rank", "most"), [("plain", "BTH", 3.1), ("beta", "none", 4.1), ("beta", "BTH", 4.1), ("beta", "BTHK", 9.1)]
)
def test_what_a_backward_pass_needs_on_any_card_beside_its_results(kind, rank, most, monkeypatch):
    """Two for the states before chunks, half of one for the cotangents of a part of them, another for those of segments; values.

    With decays per channel what is prepared of the chunks lies in the results, and the cotangents of all states are stored.
    """
    monkeypatch.setattr(table, "PARTED", 1)
    monkeypatch.setattr(table, "PARTS", (4, 4, 1))
    program, _, names, q = backward_on_a_hopper(kind, rank, monkeypatch, off=True)
    assert program.bytes <= most * q.nbytes
    assert names.count("backward") == (2 if rank == "BTHK" else 5)  # one of them scans segments from nothing


@pytest.mark.parametrize("unkept", ["unaligned", "idle", "recorded"])
def test_a_backward_pass_prepares_again_what_was_not_kept(unkept, monkeypatch):
    tokens, processors = 4000 if unkept == "unaligned" else 4096, 1000 if unkept == "idle" else 1
    _, saved, names, _ = backward_on_a_hopper("beta", "BTH", monkeypatch, tokens, processors, reuse=unkept != "recorded")
    assert saved[2:] == (None,) * 6 and "prepare" in names


def test_what_was_kept_is_prepared_again_where_another_kernel_reads_decayed_queries(monkeypatch):
    """Without the decay's gradient two kernels take the place of the fused one."""
    _, saved, names, _ = backward_on_a_hopper("plain", "BTHK", monkeypatch, heads=132, tokens=128, ddecay=False)
    assert saved[7] is None and names.count("prepare") == 1


def backward_on_a_hopper(kind, rank, monkeypatch, tokens=4096, processors=1, reuse=True, heads=2, ddecay=True, off=False):
    """Its program, the tensors saved for backward, the names of its kernels, and the queries; with Hopper's own kernels ``off`` or not."""
    monkeypatch.setitem(hopper._gluon_refusals, torch.device("cpu"), "this test asks for it" if off else None)
    monkeypatch.setattr(choice, "multiprocessors", lambda device: processors)
    call = cases.make(kind, rank, B=1, T=tokens, H=heads, K=128, V=128, initial=False).to(torch.bfloat16, torch.bfloat16)
    t = call.tensors
    given = (t["q"], t["k"], t["v"], t.get("decay"), t.get("beta"), t.get("read"), t.get("write"), None, None, None)
    with Machine(CARDS["sm_90"], wanted="no module")():
        saved = chunks._forward(Recorder(t["v"], given), *given, 1.0, False, True, reuse)[2:]
        recorder = Recorder(t["v"], (*given, t["v"], *saved))
        results = chunks._backward(recorder, *given, t["v"], None, *saved, 1.0, ddecay and "decay" in t)
    return Program(recorder, results), saved, [kernel.fn.__name__ for kernel, *_ in recorder.launches], t["q"]
