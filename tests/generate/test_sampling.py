"""Probabilities against their definition, draws against probabilities."""

import math

import pytest
import torch

from linattn.generate import Sampling, probabilities, sample, sampling
from linattn.generate.sampling import greedy, sample_rows

P = torch.tensor([[0.05, 0.4, 0.1, 0.2, 0.25]])


@pytest.mark.parametrize(
    ("how", "want"),
    [
        ({}, [0.05, 0.4, 0.1, 0.2, 0.25]),
        ({"top_k": 2}, [0, 0.4 / 0.65, 0, 0, 0.25 / 0.65]),
        ({"top_k": 99}, [0.05, 0.4, 0.1, 0.2, 0.25]),
        ({"top_k": 1}, [0, 1, 0, 0, 0]),
        ({"top_p": 1.0}, [0.05, 0.4, 0.1, 0.2, 0.25]),
        ({"top_p": 0.5}, [0, 0.4 / 0.65, 0, 0, 0.25 / 0.65]),
        ({"top_p": 0.7}, [0, 0.4 / 0.85, 0, 0.2 / 0.85, 0.25 / 0.85]),
        ({"top_p": 1e-9}, [0, 1, 0, 0, 0]),
        ({"top_k": 3, "top_p": 0.5}, [0, 0.4 / 0.65, 0, 0, 0.25 / 0.65]),
        ({"top_k": 3, "top_p": 0.45}, [0, 1, 0, 0, 0]),  # 0.4 of the 0.85 after top_k suffices
        ({"temperature": 0.5}, [p * p / 0.275 for p in (0.05, 0.4, 0.1, 0.2, 0.25)]),
    ],
)
def test_probabilities(how, want):
    torch.testing.assert_close(probabilities(P.log(), Sampling(**how)), torch.tensor([want], dtype=torch.float32), rtol=1e-5, atol=1e-6)


def test_rows_are_their_own():
    logits = torch.randn(4, 9)
    how = Sampling(0.7, 5, 0.8)
    torch.testing.assert_close(probabilities(logits, how), torch.cat([probabilities(row[None], how) for row in logits]))


@pytest.mark.parametrize("top_p", [1e-6, 0.3, 0.9, 1.0])
def test_a_sort_of_the_likeliest_tokens_gives_the_same_bits(top_p, monkeypatch):
    """Also where equal probabilities are among them and among the rest, and where too few were sorted at first."""
    torch.manual_seed(0)
    logits = torch.cat([scale * torch.randn(4, 60) for scale in (0.1, 2.0, 9.0)])
    logits = torch.cat([logits, logits.round(), torch.zeros(1, 60), torch.zeros(1, 60).index_fill(-1, torch.tensor([40]), 9.0)])
    for rows in (logits, *logits.split(1)):
        want = probabilities(rows, Sampling(top_p=top_p))
        with monkeypatch.context() as patch:
            patch.setattr(sampling, "LIKELY", 8)
            assert torch.equal(probabilities(rows, Sampling(top_p=top_p)), want)


def test_draws_follow_the_probabilities():
    n, how = 40_000, Sampling(top_p=0.9)
    want = probabilities(P.log(), how)[0]
    drawn = sample(P.log().expand(n, -1), how, torch.Generator().manual_seed(0)).bincount(minlength=5) / n
    assert drawn[want == 0].sum() == 0
    assert ((drawn - want).abs() < 4 * (want * (1 - want) / n).sqrt() + 1e-9).all()


def test_rows_draw_what_each_would_alone():
    """Rows of many temperatures in two groups of top-k and top-p, and greedy ones, which are unchanged."""
    logits, rows = 3 * torch.randn(12, 50), []
    for i in range(12):
        kept = {"top_k": 7} if i % 2 else {"top_p": 0.8}
        rows.append(Sampling(temperature=0.0 if i % 5 == 4 else 0.3 + i / 7, **kept))
    out = torch.full((12,), -1)
    sample_rows(logits, [(how, torch.Generator().manual_seed(i)) for i, how in enumerate(rows)], out)
    for i, how in enumerate(rows):
        wanted = sample(logits[i : i + 1], how, torch.Generator().manual_seed(i)).item() if how.temperature else -1
        assert out[i] == wanted


def test_temperature_zero_is_greedy_and_generators_repeat():
    logits = torch.randn(50, 20)
    assert torch.equal(sample(logits, Sampling(0)), logits.argmax(-1))
    one, two = (sample(logits, Sampling(), torch.Generator().manual_seed(3)) for _ in range(2))
    assert torch.equal(one, two)
    assert not torch.equal(one, sample(logits, Sampling(), torch.Generator().manual_seed(4)))


def test_half_precision_and_large_logits():
    p = probabilities(torch.tensor([[300.0, -300.0, 290.0]], dtype=torch.bfloat16), Sampling(0.01, top_p=0.99))
    assert p.tolist() == [[1.0, 0.0, 0.0]]


@pytest.mark.parametrize(
    "how",
    [
        {"temperature": -1.0},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_k": 0},
        {"top_k": 2.5},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_p": math.nan},
    ],
)
def test_out_of_range(how):
    with pytest.raises(ValueError, match=rf"^{next(iter(how))} must be .* but came as"):
        Sampling(**how)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_most_likely_token_is_the_first_of_equal_ones(dtype):
    """As argmax says, which takes longer on a CPU; a NaN is the largest."""
    logits = torch.randint(9, (64, 3, 50), generator=torch.Generator().manual_seed(0)).to(dtype)
    logits[0, 0, 7] = torch.nan
    first = (logits == logits.amax(-1, keepdim=True)).int().argmax(-1)
    first[0, 0] = 7
    assert torch.equal(greedy(logits), first) and torch.equal(first, logits.argmax(-1))
