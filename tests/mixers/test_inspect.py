"""Known mixing matrices, and detection of defects by check_forms."""

import pytest
import torch

import linattn
from linattn.mixers import CallContext, create
from linattn.mixers.inspect import values


def x(batch=2, tokens=12, dim=32):
    return torch.randn(batch, tokens, dim, dtype=torch.float64)


@pytest.mark.parametrize("name", ["softmax", "linear_transformer"])
def test_rows_of_an_average_sum_to_one(name):
    matrix = linattn.mixing_matrix(create(name, dim=32).double(), x())
    assert matrix.shape == (2, 4, 12, 12) and (matrix >= 0).all() and not matrix.triu(1).any()
    torch.testing.assert_close(matrix.sum(-1), torch.ones(2, 4, 12, dtype=torch.float64), rtol=1e-4, atol=0)


def test_softmax_probabilities():
    mixer, tokens = create("softmax", dim=32, heads=4, kv_heads=2).double(), x()
    r = mixer.recurrence(tokens, CallContext(tokens))
    scores = torch.einsum("bthk,bshk->bhts", r.q, r.k.repeat_interleave(2, 2)) / 8**0.5
    hidden = torch.ones(12, 12, dtype=torch.bool).triu(1)
    torch.testing.assert_close(linattn.mixing_matrix(mixer, tokens), scores.masked_fill(hidden, -torch.inf).softmax(-1))


def test_retention_by_hand():
    mixer, tokens = create("retnet", dim=32, heads=2).double(), x()
    r = mixer.recurrence(tokens, CallContext(tokens))
    lag = torch.arange(12)[:, None] - torch.arange(12)
    gamma = 1 - 2.0 ** -torch.tensor([5.0, 6.0], dtype=torch.float64)
    decay = torch.where(lag >= 0, gamma[:, None, None] ** lag.clamp(min=0), 0.0)
    torch.testing.assert_close(linattn.mixing_matrix(mixer, tokens), torch.einsum("bthk,bshk->bhts", r.q, r.k) * decay * 16**-0.5)


@pytest.mark.parametrize("name", ["deltanet", "mamba2", "gated_deltanet", "softmax"])
def test_matrix_times_values(name):
    """Including erasure, skips, shared and grouped heads."""
    options = {"softmax": {"kv_heads": 2}, "mamba2": {"head_dim": 16}}.get(name, {})
    mixer, tokens = create(name, dim=32, **options).double(), x()
    call = CallContext(tokens, returning=False)
    r = mixer.recurrence(tokens, call)
    o = torch.einsum("bhts,bshv->bthv", linattn.mixing_matrix(mixer, tokens), values(mixer, tokens))
    torch.testing.assert_close(o, mixer.attend(r, call))
    torch.testing.assert_close(mixer.read(o if r.skip is None else o + r.skip, tokens), mixer(tokens))


def test_the_lstm_has_no_matrix():
    for look in (linattn.mixing_matrix, values):
        with pytest.raises(ValueError, match="lstm has no mixing matrix: its output is not linear in values"):
            look(create("lstm", dim=32), torch.zeros(1, 3, 32))


def test_forms_agree_and_print_as_a_table():
    mixer = create("gla", dim=32)
    report = linattn.check_forms(mixer, torch.randn(1, 20, 32))
    assert report.agree and set(report.errors) == {"parallel", "chunk", "recurrent", "two pieces", "uneven pieces"}
    assert str(report).splitlines()[0].split() == ["GLA", "values", "gradients"]
    assert mixer.form == "auto" and mixer.o_proj.weight.dtype == torch.float32  # it was a copy
    assert "one pass" in linattn.check_forms(create("softmax", dim=32), torch.randn(1, 5, 32)).errors


@pytest.mark.parametrize("tokens", [1, 2])
def test_forms_of_next_to_nothing(tokens):
    for name in ("gated_deltanet", "lstm"):
        assert linattn.check_forms(create(name, dim=32), torch.randn(1, tokens, 32)).agree


def test_forms_of_nothing_are_refused():
    with pytest.raises(ValueError, match="x must hold at least one token"):
        linattn.check_forms(create("gla", dim=32), torch.zeros(1, 0, 32))


Linear = linattn.mixers.info("linear").cls


class Forgetful(Linear):
    """Starts anew at every call."""

    def attend(self, r, call):
        return super().attend(r, CallContext(r.q, returning=False))


class Detached(Linear):
    """Right values, but the state is detached."""

    def forward(self, x, state=None, **kwargs):
        return super().forward(x, state and {n: t.detach() for n, t in state.items()}, **kwargs)


class Peeking(Linear):
    """A value looks one token ahead."""

    def project(self, x, call):
        r = super().project(x, call)
        return linattn.Recurrence(r.q, r.k, r.v.roll(-1, 1))


@pytest.mark.parametrize("broken", [Forgetful, Detached, Peeking])
def test_broken_mixers_are_found(broken):
    with pytest.raises(AssertionError, match="the forms do not agree to 1e-09"):
        linattn.check_forms(broken(32), torch.randn(1, 9, 32))


def test_states_whose_size_depends_on_the_pieces_are_found():
    with pytest.raises(AssertionError, match=r"state of MemoryCompressed depend on the pieces: one pass gives \{'k': "):
        linattn.check_forms(create("memory_compressed", dim=32), torch.randn(1, 9, 32))
