"""Speculative decoding gives the tokens of plain decoding for any drafts, and rolls back rejected ones completely."""

import random

import pytest
import torch

from benchmarks import speculate as benchmark
from linattn.generate import Pool, captured, lookup, noise, stream, verify_graph
from linattn.generate.lookup import Lookup
from linattn.generate.pace import GRACE, LENGTHS, SHARE, Pace, Share
from linattn.generate.prefill import prefill
from linattn.generate.verify import accepted
from linattn.models import LanguageModel, LMConfig
from tests.sweeps import swept

VOCABULARY = 12
MIXERS = ["gla, softmax", "mamba2", "rwkv7"]  # a cache, short convolutions, values that layers share


def model(mixer: str = "gla", layers: int = 2, seed: int = 0) -> LanguageModel:
    torch.manual_seed(seed)
    return LanguageModel(LMConfig(vocab_size=VOCABULARY, dim=32, layers=layers, mixer=mixer)).double().eval()


@pytest.fixture
def drafting(monkeypatch):
    """Always draft, with random lengths."""
    draw = random.Random(0)
    monkeypatch.setattr(lookup, "SIZES", (3, 1))
    monkeypatch.setattr(Pace, "length", lambda self, available, shares: draw.choice([0, 3, 7]) if any(available) else 0)


@pytest.mark.parametrize("mixer", swept(benchmark.causal()))
def test_random_patterns_equal_decoding_token_by_token(mixer):
    found = benchmark.patterns(mixer, 3, 3)
    assert found["error"] < 1e-10
    assert found["bits"]


def test_batches_of_patterns_are_one_row():
    batches = [{"error": error, "bits": bits, "patterns": 500, "seconds": 0.25} for error, bits in ((1e-15, True), (3e-15, False))]
    row = benchmark.joined_row("gla", batches)
    assert (row["error"], row["bits"], row["patterns"], row["seconds"]) == (3e-15, False, 1000, 0.5)


@pytest.mark.slow
@pytest.mark.parametrize("mixer", benchmark.causal())
def test_many_random_patterns_equal_decoding_token_by_token(mixer):
    found = benchmark.patterns(mixer, 50, 20, seed=1)
    assert found["error"] < 1e-10
    assert found["bits"]


@pytest.mark.parametrize(
    ("temperature", "rows"), [(0, 3), (1.0, 1), *(pytest.param(*how, marks=pytest.mark.slow) for how in ((0, 1), (1.0, 3)))]
)
@pytest.mark.parametrize("mixer", MIXERS)
def test_tokens_and_states_equal_plain_decoding(mixer, temperature, rows, drafting):
    """Including seeded sampling, by lookup and by draft models that are mostly wrong or always right; with a stop token."""
    lm, small = model(mixer), model("gla", 1, seed=1)
    ids = torch.randint(VOCABULARY, (rows, 20))
    for stop in ((), (3,)):
        how = {"max_new_tokens": 12, "temperature": temperature, "stop": stop}
        plain = stream(lm, ids, **how, generator=torch.Generator().manual_seed(5))
        want = torch.stack(list(plain))
        for drafts in ({"lookup": True}, {"draft": small}, {"draft": lm}):
            tokens = stream(lm, ids, **how, generator=torch.Generator().manual_seed(5), **drafts)
            assert torch.equal(torch.stack(list(tokens)), want)
            assert tokens.drafted > 0 or stop
            assert tokens.accepted == tokens.drafted or drafts.get("draft") is not lm or stop
            for ours, theirs in zip(tokens.state.layers, plain.state.layers, strict=True):
                assert torch.equal(ours["position"], theirs["position"])
                if rows == 1:  # rows of a batch may have padding in a cache
                    for name, t in ours.items():
                        torch.testing.assert_close(t, theirs[name], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("mixer", ["gla, softmax", "mamba2"])
def test_verifications_and_captured_steps_take_turns(mixer, drafting, monkeypatch):
    monkeypatch.setattr(captured, "FROM", {"cuda": 1, "cpu": 1})
    lm, ids = model(mixer), torch.randint(VOCABULARY, (2, 20))
    how = {"max_new_tokens": 40, "temperature": 1.0}
    want = torch.stack(list(stream(lm, ids, **how, generator=torch.Generator().manual_seed(5))))
    runs, run = [], captured.Step.run
    monkeypatch.setattr(captured.Step, "run", lambda self: runs.append(self) or run(self))
    for drafts in ({"lookup": True}, {"draft": model("gla", 1, seed=1)}):
        tokens = stream(lm, ids, **how, generator=torch.Generator().manual_seed(5), **drafts)
        assert torch.equal(torch.stack(list(tokens)), want)
        assert tokens.verified > 2
    assert len(runs) > 5


def test_the_state_between_two_tokens_has_read_the_returned_ones_alone(drafting):
    lm, ids = model("gla, softmax"), torch.randint(VOCABULARY, (2, 9))
    tokens, found = stream(lm, ids, max_new_tokens=40, temperature=0, lookup=True), []
    for token in tokens:
        found.append(token)
        if len(found) % 7 == 3:
            assert tokens.state.position.tolist() == [9 + len(found)] * 2
            with torch.no_grad():
                want = lm(torch.cat([ids, torch.stack(found, 1)], 1))[:, -1]
            again = next(stream(lm, torch.stack(found, 1)[:, -1:], max_new_tokens=1, temperature=0, state=tokens.unfinished_state))
            assert torch.equal(again, want.argmax(-1))
    assert torch.equal(torch.stack(found), torch.stack(list(stream(lm, ids, max_new_tokens=40, temperature=0))))


def test_sampled_tokens_have_the_distribution_of_the_model(drafting):
    """Pairs of tokens after one prompt, drafted by another model, against products of the model's probabilities (χ²)."""
    lm, small, ids, count = model(), model("gla", 1, seed=1), torch.randint(VOCABULARY, (1, 6)), 300
    with torch.no_grad():
        first = lm(ids)[0, -1].softmax(-1)
        second = lm(torch.cat([ids.expand(VOCABULARY, -1), torch.arange(VOCABULARY)[:, None]], 1))[:, -1].softmax(-1)
    p = (first[:, None] * second).flatten()
    generator = torch.Generator().manual_seed(0)
    many = stream(lm, ids.expand(count, -1), max_new_tokens=5, generator=generator, draft=small)
    one, two, *_ = list(many)
    seen = (one * VOCABULARY + two).bincount(minlength=len(p))
    statistic = float(((seen - count * p) ** 2 / (count * p)).sum())
    spread = float((2 * (len(p) - 1) + (1 / p).sum() / count) ** 0.5)  # the variance of Pearson's statistic, up to terms of 1 / count
    assert many.accepted > 0
    assert abs(statistic - (len(p) - 1)) < 5 * spread


def test_noise_belongs_to_positions():
    model = LanguageModel(LMConfig(vocab_size=7, dim=16, layers=1))
    first = noise.Noise(2, model, torch.Generator().manual_seed(1))
    second = noise.Noise(2, model, torch.Generator().manual_seed(1))
    late = first.at([(1, 5)])
    second.drop(0)
    assert torch.equal(torch.cat([second.at([(1, i)]) for i in range(6)])[5:], late)
    assert torch.equal(first.at([(0, 2), (1, 0)]), second.at([(0, 2), (1, 0)]))
    plain = torch.Generator().manual_seed(1)
    assert torch.equal(first.at([(0, 0), (1, 0)]), torch.empty(2, 7).exponential_(1, generator=plain))


def test_lookup_goes_on_where_the_last_tokens_stood_before(monkeypatch):
    monkeypatch.setattr(lookup, "SIZES", (3, 2))
    assert Lookup([1, 2, 3, 4, 5, 9, 2, 3]).propose(3) == [4, 5, 9]
    assert Lookup([1, 2, 3, 4, 2, 3, 5, 1, 2, 3]).propose(2) == [4, 2]  # three equal tokens precede a later match of two
    assert Lookup([7, 8, 7, 8, 7, 8]).propose(5) == [7, 8, 7, 8, 7]
    assert Lookup([1, 2, 3]).propose(4) == []
    text = Lookup([5, 6])
    text.extend([7, 5, 6])
    assert text.propose(2) == [7, 5]


def test_a_draft_is_right_up_to_the_first_other_token():
    assert accepted([1, 2, 3], [2, 3, 4]) == [2, 3, 4]
    assert accepted([1, 2, 3], [2, 9, 4]) == [2, 9]
    assert accepted([1, 2, 3], [9, 3, 4]) == [9]
    assert accepted([1, 2, 3], [2, 3, 4], stops=(2,)) == [2]


class Clock:
    """A clock controlled by the test."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr("linattn.generate.pace.time", made)
    return made


def paced(clock, right: float, tokens: int, cost) -> tuple[float, int]:
    """Time of ``tokens`` tokens, with steps of 1, if all but a share ``right`` of drafts end in a wrong token; and the last draft
    length.
    """
    pace, share, draw, made, length = Pace(), Share(), random.Random(0), 0, 0
    while made < tokens:
        length = pace.length([31], [share])
        if not length:
            with pace.stepping():
                clock.now += 1.0
            made += 1
            continue
        good = next((i for i in range(length) if draw.random() >= right), length)
        clock.now += cost(length + 1)
        pace.verified(cost(length + 1), [length], [good], [share])
        made += good + 1
    return clock.now, length


def test_drafts_that_are_wrong_cost_next_to_nothing(clock):
    for cost in (lambda n: 3 + 0.1 * n, lambda n: 30.0):
        seconds, _ = paced(clock, 0.0, 1000, cost)
        worst = max(cost(n + 1) for n in LENGTHS) - 1
        assert seconds <= 1000 * (1 + SHARE) / (1 - SHARE) + GRACE + worst
        clock.now = 0.0


def test_drafts_that_are_right_become_long(clock):
    seconds, length = paced(clock, 1.0, 1000, lambda n: 3 + 0.1 * n)
    assert length == LENGTHS[-1]
    assert seconds < 1000 / 4


def test_no_draft_is_verified_where_a_call_costs_more_than_the_longest_could_save(clock):
    for seconds, wanted in ((40.0, False), (4.0, True)):
        pace = Pace()
        with pace.reading():
            clock.now += seconds
        with pace.stepping():
            clock.now += 1.0
        assert bool(pace.least(1)) is wanted and bool(pace.length([31], [Share()])) is wanted


def test_the_first_draft_is_long_enough_to_pay(clock):
    pace = Pace()
    pace.expect(12.0)
    with pace.stepping():
        clock.now += 1.0
    assert pace.length([31], [Share()]) == 15


@pytest.mark.parametrize(
    ("mixer", "rows"),
    [("gla", 3), ("gated_deltanet", 1), ("mamba2", 1), ("rwkv7", 3)]
    + [pytest.param(*how, marks=pytest.mark.slow) for how in (("gla", 1), ("gated_deltanet", 3), ("mamba2", 3), ("rwkv7", 1))],
)
def test_verification_on_the_buffers_of_a_step(mixer, rows, drafting, monkeypatch):
    """The GPU's path without a CUDA graph: tokens and states equal plain decoding, with and without stop tokens."""
    lm = model(mixer)
    monkeypatch.setattr(verify_graph, "refusal", lambda _: None)
    ids = torch.arange(40 * rows).view(rows, 40) * 5 % VOCABULARY
    for stops in ([], [3]):
        how = {"max_new_tokens": 120, "temperature": 0.0, "stop": stops}
        wanted = torch.stack(list(stream(lm, ids, **how)), 1)
        tokens = stream(lm, ids, **how, lookup=True)
        assert torch.equal(torch.stack(list(tokens), 1), wanted)
        assert stops or (tokens.verified > 3 and tokens._kept is not None and tokens._kept.verifications)
        again = prefill(lm.model, torch.cat([ids, wanted], 1))[1]
        for layer, other in zip(tokens.state.layers, again.layers, strict=True):
            assert stops or all(torch.allclose(t.double(), other[name].double(), rtol=1e-4, atol=1e-6) for name, t in layer.items())


@pytest.mark.parametrize("mixer", ["gla", "mamba2, mla", "gla, softmax"])
def test_a_pool_gives_the_same_tokens(mixer, drafting):
    lm, draw = model(mixer), random.Random(0)
    pool = Pool(lm, slots=3, lookup=True, context=128, prefix_bytes=1 << 20, block=8)
    prompts = [[draw.randrange(VOCABULARY) for _ in range(draw.randrange(1, 20))] for _ in range(4)]
    how = [{"max_new_tokens": draw.randrange(1, 20), "temperature": float(i % 3 > 0), "stop": [3] if i % 2 else []} for i in range(4)]
    requests = [pool.submit(ids, **own, seed=i) for i, (ids, own) in enumerate(zip(prompts, how, strict=True))]
    twin = None
    for request, _ in pool.run():
        if twin is None and request is requests[0] and len(request.tokens) == 2:
            twin = pool.fork(request)
    assert twin is None or twin.tokens == requests[0].tokens  # greedy
    for i, (request, ids, own) in enumerate(zip(requests, prompts, how, strict=True)):
        assert request.tokens == list(stream(lm, ids, **own, generator=torch.Generator().manual_seed(i)))


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ({"lookup": 1}, ValueError, "lookup must be True or False"),
        ({"draft": 3}, TypeError, "draft must be a linattn.LanguageModel or its Hugging Face twin"),
    ],
)
def test_wrong_arguments_are_refused_at_once(how, error, message):
    with pytest.raises(error, match=message):
        stream(model(), [1], max_new_tokens=1, **how)
    other = LanguageModel(LMConfig(vocab_size=VOCABULARY + 1, dim=32, layers=1))
    with pytest.raises(ValueError, match="draft must have the vocabulary of model, 12 tokens, but came with 13"):
        stream(model(), [1], max_new_tokens=1, draft=other)
