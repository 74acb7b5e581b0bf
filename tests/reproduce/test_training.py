"""Trainings shared by several studies."""

import pytest

from linattn.reproduce import hybrids, precision
from linattn.reproduce.synthetic import finish
from linattn.reproduce.training import Stack, on_recall

RUN = {
    "dim": 8, "layers": 1, "ffn_dim": 8, "vocab_size": 16, "lengths": [[8, 2]], "examples": 4, "epochs": 1, "batch_size": 4,
    "learning_rate": 1e-3, "seed": 0, "device": "cpu",
}  # fmt: skip


@pytest.mark.parametrize("tied", [None, False, True])
def test_one_matrix_embeds_and_answers_where_it_is_asked_for(tied):
    run = RUN if tied is None else {**RUN, "tie_embeddings": tied}
    model, unseen = finish(on_recall(Stack.of("deltanet"), run))
    embedding, head = model.language.model.embedding.weight, model.language.lm_head.weight
    assert (embedding is head) == bool(tied)
    assert len(unseen) == 512


@pytest.mark.parametrize("study", [hybrids, precision])
def test_of_many_words_only_one_matrix_learns(study):
    """See benchmarks/log.md; with few words two matrices learn sooner."""
    assert study.FULL.recall["tie_embeddings"] and "tie_embeddings" not in study.QUICK.recall
