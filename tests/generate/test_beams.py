"""Beam search against exhaustive search and transformers' search; arguments."""

from itertools import product

import pytest
import torch

import linattn
from linattn.generate import beam_search

VOCABULARY, PROMPT = 5, [1, 3, 0, 2]


def model_of(mixer: str, vocabulary: int = VOCABULARY) -> linattn.LanguageModel:
    torch.manual_seed(0)
    lm = linattn.LanguageModel(linattn.LMConfig(vocab_size=vocabulary, dim=32, layers=2, mixer=mixer)).eval()
    with torch.no_grad():
        lm.lm_head.weight.mul_(20)  # away from ties
    return lm


def score(lm, tokens, penalty) -> float:
    with torch.no_grad():
        logits = lm(torch.tensor([PROMPT + list(tokens)]))[0].log_softmax(-1)
    return sum(logits[len(PROMPT) - 1 + i, t].item() for i, t in enumerate(tokens)) / len(tokens) ** penalty


@pytest.mark.parametrize("mixer", ["gated_deltanet, softmax", "rwkv7", "mamba2"])
@pytest.mark.parametrize(("penalty", "stop"), [(1.0, ()), (0.0, (4,)), (1.5, (4, 2))])
def test_wide_enough_it_finds_the_best_of_all(mixer, penalty, stop):
    lm, steps = model_of(mixer), 3
    ended = {tuple(t[: next((i for i, x in enumerate(t) if x in stop), steps - 1) + 1]) for t in product(range(VOCABULARY), repeat=steps)}
    wanted = sorted(((score(lm, t, penalty), t) for t in ended), reverse=True)[:3]
    found = beam_search(lm, PROMPT, beams=VOCABULARY**steps, max_new_tokens=steps, stop=stop, length_penalty=penalty)
    assert len(found) == len(ended)
    for beam, (value, tokens) in zip(found, wanted, strict=False):
        assert beam.tokens == list(tokens) and beam.score == pytest.approx(value, rel=1e-4)


@pytest.mark.parametrize("end", [None, 7])
def test_it_equals_that_of_transformers(end):
    from linattn.hf import LinattnForCausalLM, LMConfig

    lm = model_of("gated_deltanet, softmax", 40)
    twin = LinattnForCausalLM(LMConfig(vocab_size=40, dim=32, layers=2, mixer="gated_deltanet, softmax")).eval()
    twin.load_state_dict(lm.state_dict())
    how = {"num_beams": 4, "num_return_sequences": 4, "max_new_tokens": 9, "do_sample": False, "eos_token_id": end, "pad_token_id": 0}
    ids = torch.tensor([PROMPT])
    theirs = twin.generate(ids, attention_mask=torch.ones_like(ids), return_dict_in_generate=True, output_scores=True, **how)
    for model in (lm, twin):
        found = beam_search(model, PROMPT, beams=4, max_new_tokens=9, stop=() if end is None else (end,))
        for beam, row, value in zip(found, theirs.sequences.tolist(), theirs.sequences_scores.tolist(), strict=True):
            assert beam.tokens == row[len(PROMPT) :][: len(beam.tokens)]
            assert beam.score == pytest.approx(value, rel=1e-4)


def test_one_beam_is_greedy():
    lm = model_of("gla", 40)
    greedy = list(linattn.generate.stream(lm, PROMPT, max_new_tokens=12, temperature=0.0))
    assert beam_search(lm, torch.tensor(PROMPT), beams=1, max_new_tokens=12)[0].tokens == greedy


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"beams": 0}, "beams must be"), ({"max_new_tokens": 0}, "max_new_tokens must be"),
        ({"length_penalty": "1"}, "length_penalty must be a number"), ({"ids": []}, "ids must be a prompt"),
        ({"ids": [[1], [2]]}, "ids must be a prompt"), ({"ids": [VOCABULARY]}, "ids"), ({"stop": "a"}, "stop must be a list of tokens"),
    ],
)  # fmt: skip
def test_errors(how, words):
    with pytest.raises((TypeError, ValueError, IndexError), match=words):
        beam_search(model_of("gla"), **({"ids": PROMPT, "max_new_tokens": 2} | how))
