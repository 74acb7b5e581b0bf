"""Prompts read in padded batches, as on a GPU, against prompts read alone."""

import pytest
import torch

from linattn import mixers
from linattn.generate import Pool, prompts, reading, stream
from linattn.generate.reading import Batch, Batches
from linattn.models import LanguageModel, LMConfig

RECURRENT = [n for n in mixers.available() if mixers.info(n).resumable and mixers.info(n).recurrent]
IDS = [[3, 1], [4, 1, 5, 9, 2], [6]]
THEN = [[5, 3, 5], [8], [9, 7, 9, 3]]


def model(mixer: str) -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(LMConfig(vocab_size=40, dim=32, layers=2, mixer=mixer)).eval()


@pytest.mark.parametrize("mixer", RECURRENT)
def test_a_batch_equals_each_prompt_alone(mixer):
    lm = model(mixer).double().model
    fresh = lm(torch.zeros(1, 0, dtype=torch.int64), return_state=True)[1]
    batch, states = Batch(lm, fresh, 4, 5), [None] * 3
    for given in (IDS, THEN):
        before = [fresh if state is None else state.state() for state in states]
        for part in batch.begin(list(zip(given, states, strict=True))):
            part()
        hidden, states = batch.results()
        for i, ids in enumerate(given):
            alone, state = lm(torch.tensor([ids]), before[i], return_state=True)
            torch.testing.assert_close(hidden[i], alone[0, -1], rtol=1e-9, atol=1e-10)
            for own, expected in zip(states[i].state().layers, state.layers, strict=True):
                torch.testing.assert_close(own, expected, rtol=1e-9, atol=1e-10)


@pytest.fixture
def batched(monkeypatch):
    """Pools that read in batches on a CPU too; the rows of every batch read."""
    of, rows = Batches.of, []
    monkeypatch.setattr(prompts, "_batches", lambda model, fresh, block, slots: Batches(model.model, fresh, block, slots))
    monkeypatch.setattr(Batches, "of", lambda self, pieces: rows.append(len(pieces)) or of(self, pieces))
    return rows


@pytest.mark.parametrize("mixer", ["gla", "gated_deltanet", "mamba2"])
def test_a_pool_that_reads_in_batches(mixer, batched):
    lm = model(mixer)
    mine = Pool(lm, slots=64, block=8, prefix_bytes=1 << 20)
    most = mine._reader._batches.rows(1)
    first = [list(range(i, i + 2)) for i in range(12)]
    requests = [mine.submit(ids, max_new_tokens=3 + i) for i, ids in enumerate(first)]
    late = [[1, 2, 3, 4, 5, 6, 7, 8, 9, *range(i)] for i in (0, 3, 9)]  # 1 + 3, 1 + 3 and 2 + 3 pieces, with hits
    for _ in mine.run():
        while len(requests) < 15:
            requests.append(mine.submit(late[len(requests) - 12], max_new_tokens=4))
    assert batched[0] == most == 8 and max(batched) <= most
    for ids, request in zip(first + late, requests, strict=True):
        assert request.tokens == list(stream(lm, ids, max_new_tokens=len(request.tokens), temperature=0.0))
    assert mine.free == 64


def test_a_batch_waits_for_rows_but_not_for_ever(batched):
    mine = Pool(model("gla"), slots=64, block=64)
    most = mine._reader._batches.rows(1)
    long = mine.submit([1], max_new_tokens=100)
    steps, submitted, begun = [], [], []
    for request, _ in mine.run():
        if request is long and len(long.tokens) in (5, 40):
            submitted.append(mine.submit([1, 2], max_new_tokens=2))
        if len(long.tokens) == 60 and len(submitted) == 2:
            submitted += [mine.submit([2, i], max_new_tokens=2) for i in range(most)]
        if request in submitted and request not in begun:
            begun.append(request)
            steps.append(len(long.tokens))
    assert len(steps) == 2 + most
    assert 12 <= steps[0] <= 5 + reading.PATIENCE + 1  # the first batch was read at the start
    assert 40 <= steps[1] <= 43  # long after the last batch: at once
    assert all(60 <= at <= 63 for at in steps[2:])  # a full batch does not wait
