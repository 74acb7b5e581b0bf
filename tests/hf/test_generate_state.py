"""``generate()`` after earlier tokens: states, and prefixes in a store."""

import re

import pytest
import torch

import linattn
from linattn import State
from linattn.hf import StateCache
from linattn.hf.cache import CACHE
from linattn.state import PrefixStore
from tests.hf.prompts import EVERY, MIXERS, greedy, ids_of, model, padded


def same(a: State, b: State) -> None:
    for ours, theirs in zip(a.layers, b.layers, strict=True):
        for name in ours:
            torch.testing.assert_close(ours[name], theirs[name])


# States


@pytest.mark.parametrize("mixer", EVERY)
def test_ragged_prompts_in_one_packed_prefill_equal_single_runs(mixer):
    lm, prompts = model(mixer), [ids_of(n) for n in (6, 1, 9)]
    state = lm.prefill(prompts)
    assert state.position.tolist() == [6, 1, 9]
    more = ids_of(3, 2)
    out = lm.generate(more, state=state, max_new_tokens=4, do_sample=False)
    for i, prompt in enumerate(prompts):
        whole = torch.cat([prompt, more[i]])[None]
        assert torch.equal(out[i, 2:], greedy(lm, whole, 4)[0, whole.shape[1] :])
        alone = lm.generate(more[i : i + 1], state=lm.prefill(prompt), max_new_tokens=4, do_sample=False)
        assert torch.equal(alone, out[i : i + 1])
        if "softmax" not in mixer and mixer != "log_linear":  # these two have room for the longest
            same(state.select([i]), lm.prefill(prompt))


@pytest.mark.parametrize("piece", [1, 3, 4])
def test_pieces_of_a_prefill(piece, monkeypatch):
    import sys

    lm, ids = model(), ids_of(2, 10)
    prompts = [ids[0].tolist(), ids[1, :4].tolist(), ids[1, 4:9].tolist()]
    mask = torch.ones_like(ids)
    mask[0, :3], mask[1, 8:] = 0, 0
    want = [lm.prefill(ids), lm.prefill(ids, mask), lm.prefill(prompts)]
    monkeypatch.setattr(sys.modules["linattn.generate.prefill"], "PREFILL", piece)
    got = [lm.prefill(ids), lm.prefill(ids, mask), lm.prefill(prompts)]
    more = [ids_of(s.rows, 1) for s in want]
    for a, b, x in zip(got, want, more, strict=True):
        assert torch.equal(a.position, b.position)
        cached = [lm(x, past_key_values=StateCache(s)).logits for s in (a, b)]
        torch.testing.assert_close(*cached)


@pytest.mark.parametrize("mixer", MIXERS)
def test_generate_goes_on_from_a_state(mixer):
    lm, head, ids = model(mixer), ids_of(2, 5), ids_of(2, 3)
    state = lm.prefill(head)
    before = state.clone()
    whole = torch.cat([head, ids], 1)
    want = greedy(lm, whole, 5)[:, 5:]
    for how in ({}, {"prefill_chunk_size": 2}):
        assert torch.equal(lm.generate(ids, state=state, max_new_tokens=5, do_sample=False, **how), want)
    for how in ({"num_beams": 3, "num_return_sequences": 2}, {"do_sample": True, "num_return_sequences": 2, "top_k": 20}):
        out = []
        for args in ({"inputs": ids, "state": state}, {"inputs": whole}):
            torch.manual_seed(1)
            out.append(lm.generate(**args, max_new_tokens=5, **how)[:, -5:])
        assert torch.equal(*out), how
    same(state, before)
    assert torch.equal(lm.prefill(head[0], torch.tensor([0, 1, 1, 0, 1])).position, torch.tensor([3]))
    parts = lm.prefill(head[:, 2:], state=lm.prefill(head[:, :2]))
    assert torch.equal(lm.generate(ids, state=parts, max_new_tokens=5, do_sample=False), want)


def test_a_state_with_padded_prompts_and_one_that_generate_leaves():
    lm, head = model(), ids_of(3, 4)
    for side in ("left", "right"):
        ids, mask, rows = padded(side)
        out = lm.generate(ids, attention_mask=mask, state=lm.prefill(head), max_new_tokens=4, do_sample=False)
        for got, first, row in zip(out, head, rows, strict=True):
            assert torch.equal(got[7:], greedy(lm, torch.cat([first[None], row], 1), 4)[0, 4 + row.shape[1] :])
    first = lm.generate(head, max_new_tokens=4, do_sample=False, return_dict_in_generate=True)
    ids = torch.cat([first.sequences[:, -1:], ids_of(3, 2)], 1)
    out = lm.generate(ids, state=first.past_key_values.state, max_new_tokens=3, do_sample=False)
    assert torch.equal(out[:, 1:], greedy(lm, torch.cat([first.sequences[:, :-1], ids], 1), 3)[:, 8:])


def test_forked_and_selected_states():
    lm, head, ids = model(), ids_of(2, 5), ids_of(4, 2)
    state = lm.prefill(head)
    for derived, rows in (
        (state.fork(2), [0, 0, 1, 1]),
        (state.select([1, 0, 1, 1]), [1, 0, 1, 1]),
        (State.cat([state, state]), [0, 1, 0, 1]),
    ):
        got = lm.generate(ids, state=derived, max_new_tokens=3, do_sample=False)
        assert torch.equal(got[:, 2:], greedy(lm, torch.cat([head[rows], ids], 1), 3)[:, 7:])


def test_tokens_of_numpy():
    lm, ids = model("gla"), ids_of(2, 3)
    same(lm.prefill(ids.numpy()), lm.prefill(ids))
    same(lm.prefill(ids[0].numpy()), lm.prefill(ids[0]))


def test_what_a_state_is_not_is_said():
    lm, ids = model(), ids_of(2, 3)
    state = lm.prefill(ids)
    for call, error, said in [
        (lambda: lm.generate(state=state), ValueError, "at least one token after the state"),
        (lambda: lm.generate(ids[:1], state=state), ValueError, "state must have 1 rows, one per prompt, but came with 2"),
        (lambda: lm.generate(ids, state={}, max_new_tokens=1), TypeError, "must be a linattn.State, but came as dict"),
        (lambda: lm.generate(ids, state=state, past_key_values=StateCache(), max_new_tokens=1), ValueError, "give generate one of them"),
        (lambda: lm.generate(ids, state=state, use_cache=False, max_new_tokens=1), ValueError, "use_cache=False reads all tokens"),
        (lambda: lm.prefill(ids[:1], state=state), ValueError, "state must have 1 rows, one per prompt, but came with 2"),
        (lambda: lm.generate(ids[:, :0], max_new_tokens=1), ValueError, r"at least one token, but came with shape \[2, 0\]"),
        (lambda: lm.prefill(ids[:, :0]), ValueError, r"at least one token, but came with shape \[2, 0\]"),
        (lambda: lm.prefill(ids, ids[:1]), ValueError, r"attention_mask must have the shape of input_ids, \[2, 3\], but came with .*1, 3"),
        (lambda: lm.prefill(ids, ids.tolist()), ValueError, r"attention_mask must have the shape .* \[2, 3\], but came as list"),
        (lambda: lm.prefill("hello"), TypeError, "input_ids must be integers, but contain 'h'"),
        (lambda: lm.prefill([[1, 2], ["a"]]), TypeError, "input_ids must be integers, but contain 'a'"),
        (lambda: lm.prefill(None), TypeError, "input_ids must be a prompt of tokens or a list of prompts, but came as NoneType"),
        (lambda: lm.generate(ids, prefixes=5), TypeError, "prefixes must be a PrefixStore or its folder, but came as int"),
        (lambda: lm.prefill([[1]], ids), ValueError, "attention_mask must have a tensor beside it as input_ids"),
        (lambda: lm.prefill([[1], []]), ValueError, "every prompt must have at least one token"),
        (lambda: lm.prefill(ids, state=state, prefixes="x"), ValueError, "state must be None"),
        (lambda: lm.prefill(ids, state={}), TypeError, "must be a linattn.State, but came as dict"),
        (lambda: lm.generate([[1, 2]], max_new_tokens=1), ValueError, r"input_ids must be a tensor \[B, T\], but came as list"),
        (lambda: lm.generate(ids[0], max_new_tokens=1), ValueError, r"input_ids must be a tensor \[B, T\], but came with shape \[3\]"),
        (lambda: model("gla", layers=1).generate(ids, state=state, max_new_tokens=1), ValueError, "state has 2 layers"),
        (lambda: model(mixer_options={"gla": {"heads": 2}}).generate(ids, state=state, max_new_tokens=1), ValueError, "state"),
        (lambda: model("retnet, softmax").generate(ids, state=state, max_new_tokens=1), ValueError, "state"),
    ]:
        with pytest.raises(error, match=said):
            call()


@pytest.mark.parametrize("shape", [(2, 2), (2, 4), (1, 3), (3,), (2, 1, 3)])
@pytest.mark.parametrize("before", ["nothing", "a state", "a store"])
def test_a_mask_is_as_the_prompts_are(shape, before, tmp_path):
    lm, ids = model(), ids_of(2, 3)
    given = {"nothing": {}, "a state": {"state": lm.prefill(ids)}, "a store": {"prefixes": tmp_path}}[before]
    came = re.escape(str(list(shape)))
    with pytest.raises(ValueError, match=rf"attention_mask must be .* shape \[2, 3\], but came with shape {came}"):
        lm.generate(ids, attention_mask=torch.ones(shape), max_new_tokens=1, **given)


@pytest.mark.parametrize("mixer", MIXERS)
def test_saved_and_loaded_states_go_on(mixer, tmp_path):
    lm, head, ids = model(mixer), ids_of(2, 5), ids_of(2, 2)
    path = tmp_path / "chat.safetensors"
    lm.prefill(head).save(path, model=lm)
    state = State.load(path, model=lm)
    out = lm.generate(ids, state=state, max_new_tokens=3, do_sample=False)
    assert torch.equal(out[:, 2:], greedy(lm, torch.cat([head, ids], 1), 3)[:, 7:])


# Prefixes


@pytest.fixture
def seen(monkeypatch):
    """Number of tokens per row of each forward pass."""
    widths = []
    forward = linattn.models.Backbone.forward

    def watched(self, ids, *args, **kwargs):
        widths.append(ids.shape[1])
        return forward(self, ids, *args, **kwargs)

    monkeypatch.setattr(linattn.models.Backbone, "forward", watched)
    return widths


@pytest.mark.parametrize("mixer", MIXERS)
def test_generate_resumes_from_the_longest_stored_prefix(mixer, tmp_path, seen):
    lm, ids = model(mixer), ids_of(1, 12)
    want = greedy(lm, ids, 4)
    seen.clear()
    assert torch.equal(lm.generate(ids, prefixes=tmp_path, max_new_tokens=4, do_sample=False), want)
    assert seen == [11, 1, 1, 1, 1]
    seen.clear()
    assert torch.equal(lm.generate(ids, prefixes=tmp_path, max_new_tokens=4, do_sample=False), want)
    assert seen == [1, 1, 1, 1]
    longer = torch.cat([want, ids_of(1, 5)], 1)  # the next turn of a conversation
    answer = greedy(lm, longer, 2)
    seen.clear()
    assert torch.equal(lm.generate(longer, prefixes=PrefixStore(tmp_path), max_new_tokens=2, do_sample=False), answer)
    assert seen == [20 - 15, 1, 1]  # the last token is read separately; 15 of 21 were stored
    beams = {"max_new_tokens": 4, "num_beams": 3, "do_sample": False}  # several continuations, none of whose states is kept
    assert torch.equal(lm.generate(ids, prefixes=tmp_path, **beams), lm.generate(ids, **beams))
    other = torch.cat([ids[:, :11], ids_of(1, 3)], 1)
    answer = greedy(lm, other, 2)
    seen.clear()
    out = lm.generate(other, prefixes=tmp_path, max_length=16, do_sample=False, return_dict_in_generate=True, repetition_penalty=1.0)
    assert torch.equal(out.sequences, answer)
    assert seen[0] == 2


@pytest.mark.parametrize("mixer", ["gla", "mamba2, softmax"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_batches_resume_where_all_rows_can(mixer, side, tmp_path, seen):
    lm, head = model(mixer), ids_of(1, 6)
    lm.prefill(head, prefixes=tmp_path)
    assert seen == [6]
    same(lm.prefill(head, prefixes=tmp_path), lm.prefill(head))
    rows = [ids_of(1, n) for n in (3, 7, 5)]
    whole = [torch.cat([head, row], 1) for row in rows]
    width = max(w.shape[1] for w in whole)
    ids, mask = torch.zeros(3, width, dtype=torch.long), torch.zeros(3, width, dtype=torch.long)
    for i, row in enumerate(whole):
        at = slice(0, row.shape[1]) if side == "right" else slice(width - row.shape[1], width)
        ids[i, at], mask[i, at] = row[0], 1
    seen.clear()
    out = lm.generate(ids, attention_mask=mask, prefixes=tmp_path, max_new_tokens=3, do_sample=False)
    assert seen == [2, 5, 1, 1]  # up to the shortest prompt, and then the rest
    assert torch.equal(out[:, :width], ids)
    for got, row in zip(out, whole, strict=True):
        assert torch.equal(got[width:], greedy(lm, row, 3)[0, row.shape[1] :])
    out = []
    for where in ({"prefixes": tmp_path}, {}):
        torch.manual_seed(0)
        out.append(lm.generate(ids, attention_mask=mask, num_beams=2, max_new_tokens=3, do_sample=True, top_k=9, **where))
    assert torch.equal(*out)


@pytest.mark.parametrize("read", [0, 3, 6])
def test_a_penalty_looks_at_all_of_a_prompt_and_at_no_padding(read, tmp_path):
    lm, (ids, mask, rows) = model(), padded("left", (9, 14, 11))
    if read:
        lm.prefill([row[0, :read].tolist() for row in rows], prefixes=tmp_path)
    for _ in range(8):
        ids[mask == 0] = lm(ids, attention_mask=mask).logits[0, -1].argmax()  # padding by a token that is likely
        how = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False, "repetition_penalty": 1.5}
        for more in ({}, {"num_beams": 2}):
            assert torch.equal(lm.generate(ids, prefixes=tmp_path, **how, **more), lm.generate(ids, **how, **more))
        ids = torch.where(mask == 1, ids_of(*ids.shape), ids)


@pytest.mark.parametrize("by", ["input_ids", "inputs_embeds"])
def test_a_cache_that_has_read_all_of_the_prompt_is_refused(by):
    lm, ids = model(), ids_of(2, 12)
    given = {"input_ids": ids, "inputs_embeds": lm.get_input_embeddings()(ids).detach()}[by]
    for width in (6, 8, 9, 10):
        cache = StateCache(lm.prefill(ids[:, :9]), 9)
        for mask in (None, torch.ones(2, width)):
            how = {by: given[:, :width], "attention_mask": mask, "past_key_values": cache, "max_new_tokens": 4, "do_sample": False}
            if width > 9:
                assert torch.equal(lm.generate(**how)[:, -4:], greedy(lm, ids[:, :width], 4)[:, -4:])
                break
            came = re.escape(str(list(given[:, :width].shape)))
            with pytest.raises(ValueError, match=f"{by} must be the 9 columns that {CACHE} has read .* {came}"):
                lm.generate(**how)
    cache = StateCache(lm.prefill(ids[:, :9]), 9)
    with pytest.raises(ValueError, match=rf"input_ids must be the 9 columns that {CACHE} has read .* shape \[2, 3\]"):
        lm.generate(ids[:, 9:], attention_mask=torch.ones(2, 13), past_key_values=cache, max_new_tokens=1)
    out = lm.generate(ids[:, 9:], attention_mask=torch.ones(2, 12), past_key_values=cache, max_new_tokens=4, do_sample=False)
    assert torch.equal(out[:, 3:], greedy(lm, ids, 4)[:, 12:])


def test_prompts_of_one_token_and_what_prefixes_cannot_do(tmp_path):
    lm, ids = model(), ids_of(1, 1)
    assert torch.equal(lm.generate(ids, prefixes=tmp_path, max_new_tokens=3, do_sample=False), greedy(lm, ids, 3))
    ids, mask, rows = padded("left", (1, 4))
    out = lm.generate(ids, attention_mask=mask, prefixes=tmp_path, max_new_tokens=3, do_sample=False)
    assert torch.equal(out[0, 4:], greedy(lm, rows[0], 3)[0, 1:])
    with pytest.raises(ValueError, match="needs tokens"):
        lm.generate(inputs_embeds=torch.zeros(1, 2, 32).double(), prefixes=tmp_path)
    with pytest.raises(ValueError, match="give generate one of them"):
        lm.generate(ids, prefixes=tmp_path, state=lm.prefill(ids))
    with pytest.raises(ValueError, match="use_cache=False"):
        lm.generate(ids_of(1, 3), prefixes=tmp_path, use_cache=False, max_new_tokens=1)


def test_long_prompts_share_the_pieces_that_they_pass_through(tmp_path, seen, monkeypatch):
    import sys

    monkeypatch.setattr(sys.modules["linattn.generate.prefill"], "PREFILL", 8)
    lm, ids = model(), ids_of(1, 21)
    lm.generate(ids, prefixes=tmp_path, max_new_tokens=1, do_sample=False)
    other = torch.cat([ids[:, :18], ids_of(1, 3)], 1)
    want = greedy(lm, other, 2)
    seen.clear()
    assert torch.equal(lm.generate(other, prefixes=tmp_path, max_new_tokens=2, do_sample=False), want)
    assert seen == [4, 1, 1]  # from the 16th on


def test_other_weights_find_nothing(tmp_path, seen):
    lm, ids = model(), ids_of(1, 8)
    lm.prefill(ids, prefixes=tmp_path)
    with torch.no_grad():
        lm.lm_head.weight[0, 0] += 1
    seen.clear()
    lm.prefill(ids, prefixes=tmp_path)
    assert seen == [8]
