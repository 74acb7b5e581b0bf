"""Pitfalls: each wrong form fails on the page, and the right one beside it does not."""

import pytest
import torch

import linattn
from linattn.atlas import lab, pitfalls
from tests.atlas.pages import data


@pytest.fixture
def numbers(site):
    def of(name):
        return {n["key"]: n["values"] for n in data(site, "pitfalls.html")[name]["numbers"]}

    return of


def test_a_mask_after_the_softmax_sees_the_future(numbers):
    found = numbers("masks")
    assert set(found["proper"]) == {1} and set(found["none"]) == {0}
    assert found["leak"][1] == 0 and min(found["leak"][2:]) > 0.5 and max(found["sum"]) < 0.99


def test_the_right_side_is_softmax_attention(site):
    q, k, _ = pitfalls._sentence()
    square = torch.nn.functional.scaled_dot_product_attention(
        q[None], k[None], torch.eye(12, dtype=torch.float64)[None], is_causal=True, scale=1.0
    )[0]
    for name, stop in (("masks", 1), ("index", 2)):
        right = next(s for s in data(site, "pitfalls.html")[name]["sheets"] if s["key"] == "right")["values"][stop]
        for i, row in enumerate(right):
            assert row[: i + 1] == pytest.approx(square[i, : i + 1].tolist(), rel=6e-3)


def test_a_wrong_index_gives_weights_that_add_up_to_something_else(numbers):
    found = numbers("index")
    assert set(found["proper"]) == {1} and all(abs(x - 1) > 0.3 for x in found["sum"])


def test_a_form_without_q_runs_only_by_chance(numbers):
    short, chance, long = (x["en"] for x in numbers("missing")["result"])
    assert "do not fit" in short and "do not fit" in long and chance.startswith("runs") and pitfalls.STOPS[1] == lab.SIZE


def test_a_quotient_overflows_where_the_library_does_not(numbers):
    found = numbers("quotient")
    assert isinstance(found["wrong"][-1], dict) and isinstance(found["largest"][-1], dict)
    assert found["wrong"][0] < 1e-5 and max(found["library"]) < 1e-5


def test_chunks_hold_less_and_say_the_same(numbers):
    found = numbers("blocked")
    assert max(found["apart"]) < 1e-12
    for length, square, chunks in zip((64, 256, 1024), found["square"], found["chunks"], strict=True):
        assert square == length**2 and chunks == length * 16 + length // 16 * 64


def test_a_constant_decay_is_a_clock(numbers):
    found = numbers("clock")
    assert set(found["constant"]) == {0} and min(found["head"][1:]) > 0.05


def test_every_figure_is_named_where_the_text_speaks_of_it(site):
    html = (site / "pitfalls.html").read_text(encoding="utf-8")
    assert all(f'data-set="{name}"' in html for name in pitfalls.FIGURES)
    assert linattn.mixers.info("retnet").seeds  # the notes are those that name the systems
