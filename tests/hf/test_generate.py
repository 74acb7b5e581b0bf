"""``generate()`` in every mode, with padding on either side, against the forward pass without a cache."""

import pytest
import torch
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from linattn.hf import StateCache
from tests.hf.prompts import EVERY, MIXERS, greedy, ids_of, model, padded


@pytest.mark.parametrize("mixer", EVERY)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_on_either_side_changes_nothing(mixer, side):
    lm = model(mixer)
    ids, mask, rows = padded(side)
    for how in ({}, {"prefill_chunk_size": 2}):
        out = lm.generate(ids, attention_mask=mask, max_new_tokens=5, do_sample=False, **how)
        assert torch.equal(out[:, :7], ids)
        for got, row in zip(out, rows, strict=True):
            assert torch.equal(got[7:], greedy(lm, row, 5)[0, row.shape[1] :]), how


@pytest.mark.parametrize("how", [{"num_beams": 3, "num_return_sequences": 2}, {"do_sample": True, "num_return_sequences": 2, "top_k": 20}])
@pytest.mark.parametrize("use_cache", [True, False])
def test_padded_beams_and_samples_equal_those_of_the_other_side(how, use_cache):
    lm, out = model(), {}
    for side in ("left", "right"):
        torch.manual_seed(3)
        ids, mask, _ = padded(side)
        out[side] = lm.generate(ids, attention_mask=mask, max_new_tokens=5, use_cache=use_cache, **how)
        assert torch.equal(out[side][:, :7], ids.repeat_interleave(2, 0))
    assert torch.equal(out["left"][:, 7:], out["right"][:, 7:])


def test_padding_is_found_by_its_token_and_its_place():
    lm = model()
    ids, mask, _ = padded("right")
    want = lm.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False)
    for how in ({"pad_token_id": 0}, {"generation_config": GenerationConfig(pad_token_id=0)}):
        assert torch.equal(lm.generate(ids, max_new_tokens=4, do_sample=False, **how), want)
    holes = torch.tensor([[1, 0, 1, 1, 0]])
    ids = ids_of(1, 5)
    got = lm.generate(ids, attention_mask=holes, max_new_tokens=4, do_sample=False)
    assert torch.equal(got[:, 5:], greedy(lm, ids[:, holes[0].bool()], 4)[:, 3:])
    with pytest.raises(ValueError, match="a row has only padding"):
        lm.generate(ids, attention_mask=torch.zeros_like(ids), max_new_tokens=1)


def test_padded_embeddings():
    lm = model()
    ids, mask, rows = padded("right")
    out = lm.generate(inputs_embeds=lm.get_input_embeddings()(ids), attention_mask=mask, max_new_tokens=4, do_sample=False)
    for got, row in zip(out, rows, strict=True):
        assert torch.equal(got, greedy(lm, row, 4)[0, row.shape[1] :])


def test_a_cache_goes_on_with_right_padding():
    lm, head = model(), ids_of(3, 4)
    ids, mask, rows = padded("right")
    with torch.no_grad():
        cache = lm(head).past_key_values
    whole, mask = torch.cat([head, ids], 1), torch.cat([torch.ones_like(head), mask], 1)
    out = lm.generate(whole, attention_mask=mask, past_key_values=cache, max_new_tokens=4, do_sample=False)
    assert torch.equal(out[:, :11], whole)
    for got, first, row in zip(out, head, rows, strict=True):
        assert torch.equal(got[11:], greedy(lm, torch.cat([first[None], row], 1), 4)[0, 4 + row.shape[1] :])


# Streaming and stopping


class Streamer(BaseStreamer):
    def __init__(self):
        self.pieces, self.ended = [], False

    def put(self, value):
        self.pieces.append(value.reshape(-1))

    def end(self):
        self.ended = True


@pytest.mark.parametrize("mixer", MIXERS)
def test_streaming(mixer):
    lm, ids, streamer = model(mixer), ids_of(1, 6), Streamer()
    out = lm.generate(ids, max_new_tokens=5, do_sample=False, streamer=streamer)
    assert streamer.ended
    assert [len(p) for p in streamer.pieces] == [6, 1, 1, 1, 1, 1]
    assert torch.equal(torch.cat(streamer.pieces), out[0])
    assert torch.equal(out, greedy(lm, ids, 5))


@pytest.mark.parametrize("mixer", MIXERS)
def test_end_tokens_end_a_row(mixer):
    lm, ids = model(mixer), ids_of(2, 6)
    want = greedy(lm, ids, 8)
    stop = want[0, 8].item()
    out = lm.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=stop, pad_token_id=0)
    for got, row in zip(out, want, strict=True):
        ends = [i for i in range(6, 14) if row[i] == stop][:1] or [13]
        assert torch.equal(got[: ends[0] + 1], row[: ends[0] + 1])
        assert not got[ends[0] + 1 :].any()


SAMPLED, PENALTY, TEXT = {"num_return_sequences": 2, "do_sample": True, "top_k": 1}, {"repetition_penalty": 1.001}, {"by": "text"}


@pytest.mark.parametrize("mixer", [*MIXERS, "softmax"])
@pytest.mark.parametrize(
    ("count", "how"),
    [
        *((12, how) for how in ({}, PENALTY, SAMPLED, TEXT)),
        *((80, how) for how in ({}, SAMPLED)),  # more are read by a captured step
        *(pytest.param(80, how, marks=pytest.mark.slow) for how in (PENALTY, TEXT)),  # not supported by a captured step
    ],
)
def test_rows_that_have_ended_read_no_filler(mixer, count, how):
    lm, (ids, mask, _), how = model(mixer), padded("left"), {"do_sample": False, **how}
    lm.lm_head.weight.data[0] = 0  # never the most likely
    want = lm.generate(ids, attention_mask=mask, max_new_tokens=count, do_sample=False)
    stop = want[1, 9].item()
    ends = {"eos_token_id": [stop, want[2, 11].item()]}
    if how.pop("by", None):  # like stop texts, but for one row
        ends = {"eos_token_id": ends["eos_token_id"][1], "stopping_criteria": StoppingCriteriaList([Second(stop)])}
    how |= {"max_new_tokens": count, "pad_token_id": 0, "return_dict_in_generate": True, **ends}
    for cache in (None, StateCache()):
        out = lm.generate(ids, attention_mask=mask, past_key_values=cache, **how)
        copies = len(out.sequences) // 3
        real = torch.cat([mask.repeat_interleave(copies, 0), (out.sequences[:, 7:] != 0).long()], 1)
        assert not bool(real[:, 7:].all())
        assert out.past_key_values.state.position.tolist() == real[:, :-1].sum(1).tolist()
        longer = torch.cat([out.sequences, ids_of(len(real), 3)], 1)
        real = torch.cat([real, torch.ones(len(real), 3, dtype=torch.long)], 1)
        got = lm.generate(longer, attention_mask=real, past_key_values=out.past_key_values, max_new_tokens=5, do_sample=False)
        for row, kept, new in zip(longer, real.bool(), got, strict=True):
            assert torch.equal(new[-5:], greedy(lm, row[kept][None], 5)[0, -5:])


class Second(StoppingCriteria):
    """The second row ends after a token."""

    def __init__(self, token):
        self.token = token

    def __call__(self, ids, scores, **_):
        return (ids[:, -1] == self.token) & (torch.arange(len(ids)) == 1)


def tokenizer():
    """A token for each byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.BPE({letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner)


@pytest.mark.parametrize("mixer", MIXERS)
def test_stop_strings(mixer):
    lm, words = model(mixer, vocab_size=90), tokenizer()  # tokens below 90 are ASCII, each a character
    ids = ids_of(2, 6)
    want = greedy(lm, ids, 12)
    stop = words.decode(want[0, 9:11])
    ends = [next((i for i in range(8, 19) if words.decode(row[6:i]).endswith(stop)), 18) for row in want]
    how = {"max_new_tokens": 12, "do_sample": False, "stop_strings": [stop], "tokenizer": words}
    assert 8 <= ends[0] <= 11
    for prompt, row, end in zip(ids, want, ends, strict=True):
        assert torch.equal(lm.generate(prompt[None], **how)[0], row[:end])
    for got, row, end in zip(lm.generate(ids, **how, pad_token_id=0), want, ends, strict=True):
        assert torch.equal(got[:end], row[:end])
