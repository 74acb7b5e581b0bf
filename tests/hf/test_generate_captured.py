"""``generate`` by a captured step against transformers' own loop: tokens, streams, caches."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers.generation.streamers import BaseStreamer

import linattn
from linattn.generate import capacity, captured, stream
from linattn.hf import LinattnForCausalLM, StateCache
from linattn.hf import captured as door
from tests.hf.test_load import MODELS
from tests.hf.theirs import theirs_of

WIDTH = 6
MIXERS = ["gla", "gla, softmax"]


@pytest.fixture(autouse=True)
def always(monkeypatch):
    monkeypatch.setattr(captured, "FROM", {"cuda": 1, "cpu": 1})


@pytest.fixture
def theirs(monkeypatch):
    """A function from whose call on transformers' own loop generates."""
    return lambda: monkeypatch.setattr(door, "refusal", lambda *_: "the test says so")


@pytest.fixture
def runs(monkeypatch):
    """Number of captured steps that have run."""
    count = []
    run = captured.Step.run
    monkeypatch.setattr(captured.Step, "run", lambda self: count.append(1) or run(self))
    return count


def model(mixer="gla", **options) -> LinattnForCausalLM:
    torch.manual_seed(0)
    config = linattn.LMConfig(**{"vocab_size": 50, "dim": 32, "layers": 2, "mixer": mixer, **options})
    return LinattnForCausalLM(config).eval()


def batch(rows: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(1, 50, (rows, WIDTH))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


class Kept(BaseStreamer):
    def __init__(self):
        self.seen, self.ended = [], False

    def put(self, value):
        self.seen.append(value.tolist())

    def end(self):
        self.ended = True


@pytest.mark.parametrize("how", [
    {"do_sample": False}, {"do_sample": True}, {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.02},
    {"do_sample": False, "prefill_chunk_size": 4}, {"do_sample": True, "num_return_sequences": 3},
])  # fmt: skip
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("mixer", ["gla, gated_deltanet", "mla, softmax"])
def test_the_tokens_are_those_of_its_own_loop(mixer, rows, how, theirs, runs):
    lm, ids = model(mixer), batch(rows)

    def run():
        torch.manual_seed(1)
        return lm.generate(**ids, max_new_tokens=12, **how)

    got = run()
    assert len(runs) >= 9
    theirs()
    assert torch.equal(got, run())


@pytest.mark.parametrize("mixer", MIXERS)
def test_an_end_pads_the_rows_that_have_it(mixer, theirs, runs):
    lm, ids = model(mixer), batch(3)
    eos = lm.generate(**ids, max_new_tokens=12, do_sample=False)[0, WIDTH + 5].item()
    runs.clear()
    how = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": [eos, 49], "pad_token_id": 0}
    got, one = lm.generate(**ids, **how), lm.generate(input_ids=ids["input_ids"][:1], **how)
    assert runs and one.shape[1] < WIDTH + 12
    theirs()
    assert torch.equal(got, lm.generate(**ids, **how)) and torch.equal(one, lm.generate(input_ids=ids["input_ids"][:1], **how))


@pytest.mark.parametrize("mixer", MIXERS)
def test_padded_prompts_a_streamer_and_a_cache_that_goes_on(mixer, theirs, runs):
    lm, ids = model(mixer), batch(2)
    ids["attention_mask"][0, -2:] = 0

    def run():
        cache, streamer = StateCache(), Kept()
        out = lm.generate(**ids, max_new_tokens=9, do_sample=False, past_key_values=cache, return_dict_in_generate=True)
        mask = torch.cat([ids["attention_mask"], torch.ones(2, 12, dtype=torch.long)], 1)
        longer = torch.cat([out.sequences, torch.full((2, 3), 7)], 1)
        lm.generate(ids["input_ids"][1:], max_new_tokens=5, do_sample=False, streamer=streamer)
        assert out.past_key_values is cache
        again = lm.generate(longer, attention_mask=mask, max_new_tokens=6, do_sample=False, past_key_values=cache)
        return out.sequences.tolist(), again.tolist(), cache.seen, cache.state.position.tolist(), streamer.seen, streamer.ended

    got = run()
    assert runs
    theirs()
    assert got == run()


@pytest.mark.parametrize(("name", "dense"), [
    ("qwen3_next", {"mlp_only_layers": [0, 1, 2, 3]}), ("kimi_linear", {"mlp_layer_types": ["dense"] * 4}), ("recurrent_gemma", {}),
])  # fmt: skip
def test_published_hybrids(name, dense, runs, tmp_path):
    """Compared with transformers' classes, without experts, whose token counts are unknown at capture."""
    own = theirs_of(name, **{**MODELS[name][0], **dense})
    own.save_pretrained(tmp_path)
    ids = torch.randint(3, 60, (2, 40))
    got = linattn.load(tmp_path).generate(ids, max_new_tokens=20, do_sample=False, eos_token_id=None)
    assert len(runs) >= 17 and len(set(got[0, 40:].tolist())) > 1
    for _ in range(20):
        with torch.no_grad():
            ids = torch.cat([ids, own(ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(got, ids)


@pytest.mark.parametrize(("how", "why"), [
    ({"num_beams": 2}, None), ({"repetition_penalty": 1.3}, "RepetitionPenaltyLogitsProcessor"),
    ({"use_cache": False}, "there is no cache"), ({"max_time": 9.0}, "MaxTimeCriteria"),
    ({"return_dict_in_generate": True, "output_scores": True}, "output_scores"),
])  # fmt: skip
def test_what_transformers_does_itself(how, why, runs, monkeypatch):
    said, refusal = [], door.refusal
    monkeypatch.setattr(door, "refusal", lambda *a: said.append(refusal(*a)) or said[-1])
    model().generate(**batch(1), max_new_tokens=8, do_sample=False, **how)
    assert not runs and all(why in s for s in said) and bool(said) is (why is not None)


def test_whoever_watches_the_model_sees_every_token(runs):
    lm, ids, seen = model(), batch(1), []
    wanted = lm.generate(**ids, max_new_tokens=8, do_sample=False)
    assert runs
    handle = lm.register_forward_hook(lambda module, given, out: seen.append(int(out.logits[0, -1].argmax())))
    assert torch.equal(lm.generate(**ids, max_new_tokens=8, do_sample=False), wanted)
    assert seen == wanted[0, WIDTH:].tolist()
    handle.remove()
    lm.lm_head.register_forward_hook(lambda module, given, out: -out)
    got = lm.generate(**ids, max_new_tokens=8, do_sample=False)
    assert torch.equal(got, lm.generate(**ids, max_new_tokens=8, do_sample=False, use_cache=False))


@pytest.mark.parametrize("tokens", [2, 12])
@pytest.mark.parametrize("mixer", MIXERS)
def test_what_it_leaves_may_have_a_gradient(mixer, tokens):
    """Cache and tokens may be used in a call outside of ``no_grad``, which saves both for backward."""
    lm, ids = model(mixer), batch(2)
    out = lm.generate(**ids, max_new_tokens=tokens, do_sample=False, return_dict_in_generate=True)
    lm(out.sequences[:, -1:], past_key_values=out.past_key_values).logits.sum().backward()
    for token in (written := stream(lm, ids["input_ids"], max_new_tokens=tokens)):
        lm(token[:, None], past_key_values=StateCache(written.state)).logits.sum().backward()


@pytest.mark.parametrize("mixer", MIXERS)
def test_threads_share_a_model(mixer, monkeypatch):
    monkeypatch.setattr(capacity, "LEAST", {"cpu": 16})  # so that they also go on to a step with more of it
    monkeypatch.setattr(capacity, "AHEAD", 4)
    lm, how = model(mixer), {"max_new_tokens": 20, "do_sample": False}
    prompts = [torch.full((1, 3), token) for token in (1, 2, 3, 4)]
    wanted = [lm.generate(ids, **how) for ids in prompts]
    run = captured.Step.run
    monkeypatch.setattr(captured.Step, "run", lambda self: time.sleep(1e-3) or run(self))  # in which another thread goes on
    with ThreadPoolExecutor(4) as pool:
        got = list(pool.map(lambda ids: lm.generate(ids, **how), prompts * 2))
    assert all(torch.equal(a, b) for a, b in zip(got, wanted * 2, strict=True))
