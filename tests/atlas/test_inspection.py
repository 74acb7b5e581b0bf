"""Displayed results of a system are those of its mixer."""

import re

import pytest
import torch

import linattn
from linattn.atlas import sentence
from linattn.atlas.algebra import specification
from linattn.atlas.cell import cell
from linattn.atlas.inspection import SHOWN, inspect_mixer
from linattn.atlas.systems import _rule
from linattn.mixers import create

RULES = {
    "linear": "none", "linear_transformer": "none", "performer": "none", "efficient_attention": "none", "retnet": "constant",
    "lightning": "constant", "mamba2": "head", "gated_rfa": "head", "mlstm": "head", "gla": "channel", "mamba": "channel",
    "rwkv6": "channel", "deltanet": "erase", "kda": "erase", "rwkv7": "erase", "softmax": "scores", "fox": "scores", "lstm": "other",
    "s4": "other", "mesanet": "other", "deltaproduct": "erase", "cosformer": "none",
}  # fmt: skip


def made(name):
    torch.manual_seed(sentence.SEED)
    return create(name, dim=sentence.DIM).double().eval()


@pytest.mark.parametrize("name", ["local", "transformer_xl", "compressive_transformer"])
def test_of_a_memory_with_empty_slots_the_filled_ones_are_shown(name):
    assert all(any(row) for row in inspect_mixer(name).states.values[-1][0])


@pytest.mark.parametrize("name", RULES)
def test_the_rule_follows_from_what_the_mixer_does(name):
    assert inspect_mixer(name).rule == RULES[name]


@pytest.mark.parametrize("name", ["softmax", "gla", "gated_deltanet", "rwkv7", "mamba", "s4", "fox"])
def test_the_matrix_is_the_library_s(name):
    mixer = made(name)
    with torch.no_grad():
        wanted = linattn.mixing_matrix(mixer, sentence.embedded())[0]
    seen = inspect_mixer(name)
    assert seen.heads == wanted.shape[0]
    torch.testing.assert_close(torch.tensor(seen.matrix, dtype=torch.float64), wanted[:4], rtol=0, atol=0)


@pytest.mark.parametrize("name", ["gla", "retnet", "gated_deltanet", "rwkv6"])
def test_states_are_the_definition_s(name):
    """Token by token by the reference in float64, from the mixer's projections."""
    mixer, x = made(name), sentence.embedded()
    seen = inspect_mixer(name).states
    with torch.no_grad():
        r = mixer.recurrence(x, linattn.mixers.CallContext(x, returning=False))
        for t in range(x.shape[1]):
            parts = {k: None if v is None else v[:, : t + 1] for k, v in {"q": r.q, "k": r.k, "v": r.v, "beta": r.beta}.items()}
            decay = r.decay[:, : t + 1] if r.decay is not None and r.decay.ndim > 2 else r.decay
            _, s = linattn.linear_attention(
                **parts, decay=decay, bonus=r.bonus, scale=r.scale, return_state=True, backend="reference"
            )  # fmt: skip
            for head, values in enumerate(seen.values[t]):
                wanted = s[0, head, :SHOWN, :SHOWN]
                torch.testing.assert_close(torch.tensor(values, dtype=torch.float64), wanted, rtol=1e-9, atol=1e-12)


def test_a_cache_grows_by_a_row_and_a_vector_is_one():
    seen = inspect_mixer("softmax").states
    assert seen.grows and [sum(row[0] is not None for row in step[0]) for step in seen.values] == list(range(1, 13))
    assert [len(step[0]) for step in inspect_mixer("lstm").states.values] == [1] * 12


def test_what_there_is_not_is_said():
    assert "no values" in inspect_mixer("lstm").missing["matrix"].en and "one matrix per head" in inspect_mixer("dfw").missing["matrix"].en
    assert inspect_mixer("lstm").matrix is None and inspect_mixer("lstm").spec is None
    assert inspect_mixer("agent").states is None and "all tokens at once" in inspect_mixer("agent").missing["states"].en


def test_steps_agree_with_one_pass_and_would_not_if_a_mixer_forgot():
    assert 0 < inspect_mixer("gla").stepping < 1e-13
    gla = linattn.mixers.info("gla").cls

    class Forgetful(gla):
        def attend(self, r, call):
            return super().attend(r, linattn.mixers.CallContext(r.q, returning=False))

    mixer = Forgetful(sentence.DIM).double()
    with torch.no_grad():
        assert specification(mixer, sentence.embedded()) is not None

    class Louder(gla):
        def attend(self, r, call):
            return super().attend(r, call) * r.v.abs()

    with torch.no_grad():
        assert specification(Louder(sentence.DIM).double(), sentence.embedded()) is None, "it is not that recurrence"


def test_the_cell_of_what_reads_both_ways_is_the_sum_that_it_reads():
    seen = inspect_mixer("efficientvit")
    drawn = cell(seen)
    assert seen.spec and not seen.info.causal
    assert "Σ" in drawn and "÷" in drawn and "its own rule" not in drawn and "t−1" not in drawn


def test_what_does_not_hand_anything_on_is_not_said_to_keep_a_state():
    assert "kept" in _rule(inspect_mixer("softmax")).en and "decays" in _rule(inspect_mixer("gla")).en
    assert {_rule(inspect_mixer(name)).en for name in ("cross_softmax", "agent", "swiglu")} == {"nothing: all tokens are there at once"}
    assert "all tokens" not in inspect_mixer("swiglu").missing["states"].en


def test_the_code_on_a_page_has_no_numbers_of_unnamed_texts():
    assert linattn.mixers.info("gla").seeds and "seeds" not in inspect_mixer("gla").code and "@register" in inspect_mixer("gla").code


@pytest.mark.parametrize("name", ["focused", "slab", "gla", "rwkv6", "gated_deltanet"])
def test_the_operations_of_a_cell_stand_apart(name):
    """A division by the weights and a value that passes the state are two steps."""
    places = re.findall(r'<circle class="box" cx="([\d.]+)" cy="([\d.]+)"', cell(inspect_mixer(name)))
    assert len(places) == len(set(places))
