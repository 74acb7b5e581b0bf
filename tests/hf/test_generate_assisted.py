"""transformers' assisted generation on our classes: the tokens, states and random numbers of plain generation."""

import random

import pytest
import torch
import transformers

import linattn
from linattn.generate import Pool, lookup, stream
from linattn.generate.pace import Pace
from linattn.hf import LinattnForCausalLM

VOCABULARY = 15


def model(mixer="gla", layers=2, vocabulary=VOCABULARY) -> LinattnForCausalLM:
    torch.manual_seed(0)
    config = linattn.LMConfig(
        vocab_size=vocabulary, dim=32, layers=layers, mixer=mixer, pad_token_id=0, eos_token_id=None, bos_token_id=None
    )
    return LinattnForCausalLM(config).double().eval()


@pytest.fixture(autouse=True)
def drafting(monkeypatch):
    """Always draft."""
    draw = random.Random(0)
    monkeypatch.setattr(lookup, "SIZES", (3, 1))
    monkeypatch.setattr(Pace, "length", lambda self, available, shares: draw.choice([0, 3, 7]) if any(available) else 0)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("mixer", ["gla", "gla, softmax"])
def test_assisted_generation_equals_plain(mixer, rows):
    lm, small = model(mixer), model(layers=1)
    ids = torch.randint(1, VOCABULARY, (rows, 16))
    mask = torch.ones_like(ids)
    mask[: rows - 1, :5] = ids[: rows - 1, :5] = 0
    for how in ({}, {"eos_token_id": 3}, {"do_sample": True, "temperature": 0.8, "top_k": 9}):
        outs = []
        for assistance in ({}, {"prompt_lookup_num_tokens": 5}, {"assistant_model": small}):
            torch.manual_seed(1)
            given = {"attention_mask": mask, "max_new_tokens": 12, "return_dict_in_generate": True, "pad_token_id": 0, **how}
            outs.append(lm.generate(ids, **given, **assistance))
        for out in outs[1:]:
            assert torch.equal(out.sequences, outs[0].sequences)
            for ours, theirs in zip(out.past_key_values.state.layers, outs[0].past_key_values.state.layers, strict=True):
                assert torch.equal(ours["position"], theirs["position"])
                if "S" in ours:
                    torch.testing.assert_close(ours["S"], theirs["S"], rtol=1e-9, atol=1e-11)


def test_refusals():
    lm, ids = model(), torch.ones(1, 4, dtype=torch.long)
    with pytest.raises(ValueError, match="verifies several tokens at once, but RepetitionPenaltyLogitsProcessor may read earlier tokens"):
        lm.generate(ids, max_new_tokens=4, prompt_lookup_num_tokens=3, repetition_penalty=1.5)
    with pytest.raises(ValueError, match="different tokenizers"):
        lm.generate(ids, max_new_tokens=4, assistant_model=model(vocabulary=16))
    for count in (0, -3, 2.5):
        with pytest.raises(ValueError, match="prompt_lookup_num_tokens must be an integer of at least 1, but came as"):
            lm.generate(ids, max_new_tokens=4, prompt_lookup_num_tokens=count)
    other = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=lm.config.vocab_size, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
        )
    )
    with pytest.raises(TypeError, match=r"assistant_model must be a linattn.LanguageModel or its .* but came as a LlamaForCausalLM$"):
        lm.generate(ids, max_new_tokens=4, assistant_model=other)
    for make in (lambda: stream(other, [1], max_new_tokens=1), lambda: Pool(other)):
        with pytest.raises(TypeError, match=r"model must be a linattn.LanguageModel or its .* but came as a LlamaForCausalLM$"):
            make()
