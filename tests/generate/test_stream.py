"""Decoding step by step equals the whole forward pass, with a constant-size state."""

import importlib

import pytest
import torch

from linattn.generate import stream
from linattn.models import LanguageModel, LMConfig
from linattn.state import PrefixStore

module = importlib.import_module("linattn.generate.prefill")


def model(mixer: str) -> LanguageModel:
    return LanguageModel(LMConfig(vocab_size=40, dim=32, layers=2, mixer=mixer)).double().eval()


def greedy(lm, ids, count):
    for _ in range(count):
        ids = torch.cat([ids, lm(ids)[:, -1:].argmax(-1)], 1)
    return ids


@pytest.mark.parametrize("mixer", ["gla, softmax", "mamba2", "deltanet"])
@pytest.mark.parametrize("piece", [4096, 3])
def test_greedy_equals_the_whole_forward(mixer, piece, monkeypatch):
    monkeypatch.setattr(module, "PREFILL", piece)
    lm, ids = model(mixer), torch.randint(40, (2, 8))
    want = greedy(lm, ids, 7)[:, 8:]
    assert torch.equal(torch.stack(list(stream(lm, ids, max_new_tokens=7, temperature=0)), 1), want)
    assert list(stream(lm, ids[1], max_new_tokens=7, temperature=0)) == want[1].tolist()
    assert list(stream(lm, ids[1].tolist(), max_new_tokens=7, temperature=0)) == want[1].tolist()


def test_samples_are_those_of_the_whole_forward():
    lm, ids = model("gla, softmax"), torch.randint(40, (1, 5))
    got = list(stream(lm, ids[0], max_new_tokens=6, top_k=9, generator=torch.Generator().manual_seed(2)))
    generator = torch.Generator().manual_seed(2)
    for token in got:
        logits = lm(ids)[:, -1]
        best = logits.topk(9)
        p = torch.zeros_like(logits, dtype=torch.float32).scatter(-1, best.indices, best.values.float().softmax(-1))
        assert torch.multinomial(p, 1, generator=generator).item() == token
        ids = torch.cat([ids, torch.tensor([[token]])], 1)


@pytest.mark.parametrize(("mixer", "constant"), [("gla", True), ("gated_deltanet", True), ("softmax", False)])
def test_the_state_is_constant_where_the_mixers_are_recurrent(mixer, constant):
    lm, sizes, widths = model(mixer), [], []

    def watch(_, args, out):
        sizes.append(out[1].nbytes)
        widths.append(args[0].shape[1])

    lm.model.register_forward_hook(watch)
    list(stream(lm, [1, 2, 3], max_new_tokens=12, temperature=0))
    assert widths == [3] + [1] * 11  # one pass over the prompt, then a token at a time
    assert (len(set(sizes)) == 1) is constant


def test_a_stop_token_ends_a_row():
    lm, ids = model("gla"), torch.randint(40, (2, 6))
    want = greedy(lm, ids, 12)[:, 6:]
    stop = want[0, 3].item()
    first = [row.tolist().index(stop) if stop in row.tolist() else None for row in want]
    assert list(stream(lm, ids[0], max_new_tokens=12, temperature=0, stop=[stop])) == want[0, : first[0] + 1].tolist()
    rows = torch.stack(list(stream(lm, ids, max_new_tokens=12, temperature=0, stop=[stop])), 1)
    assert rows[0, : first[0] + 1].tolist() == want[0, : first[0] + 1].tolist()
    assert set(rows[0, first[0] :].tolist()) == {stop}
    if first[1] is None:
        assert torch.equal(rows[1], want[1])
    assert list(stream(lm, ids[0], max_new_tokens=12, temperature=0, stop=want[0].tolist())) == want[0, :1].tolist()


@pytest.mark.parametrize("mixer", ["gla, softmax", "mamba2", "deltanet"])
def test_it_goes_on_from_a_state(mixer):
    lm, ids = model(mixer), torch.randint(40, (2, 8))
    want = greedy(lm, ids, 9)[:, 8:]
    tokens = stream(lm, ids, max_new_tokens=9, temperature=0)
    assert tokens.nbytes == 0
    first = [next(tokens) for _ in range(4)]
    state = tokens.state  # has read the prompt and four tokens
    assert state.position.tolist() == [12, 12]
    assert tokens.nbytes == state.nbytes > 0
    assert torch.equal(torch.stack([*first, *tokens], 1), want)  # reading the state changes nothing
    assert tokens.state.position.tolist() == [17, 17]
    after = torch.randint(40, (2, 3))
    got = torch.stack(list(stream(lm, after, max_new_tokens=5, temperature=0, state=state)), 1)
    assert torch.equal(got, greedy(lm, torch.cat([ids, want[:, :4], after], 1), 5)[:, 15:])
    read = stream(lm, ids[0], max_new_tokens=0)
    assert list(read) == []
    alone = list(stream(lm, after[0], max_new_tokens=5, temperature=0, state=read.state))
    assert alone == greedy(lm, torch.cat([ids[:1], after[:1]], 1), 5)[0, 11:].tolist()
    with pytest.raises(ValueError, match="state must have a row for each sequence of ids, 1, but came with 2"):
        stream(lm, ids[0], max_new_tokens=1, state=state)


def test_nothing_learns_and_nothing_is_counted():
    lm = model("gla")
    tokens = stream(lm, torch.tensor([[1, 2]]), max_new_tokens=3, temperature=0)
    assert not any(token.requires_grad for token in tokens)
    assert list(stream(lm, [1], max_new_tokens=0)) == []


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"ids": []}, r"ids must be a prompt \[T\] or \[B, T\] of at least one token, but came with shape \[0\]"),
        ({"ids": torch.zeros(1, 1, 1, dtype=torch.long)}, "ids must be a prompt"),
        ({"ids": torch.zeros(3)}, "ids must be integers"),
        ({"max_new_tokens": -1}, "max_new_tokens must be an integer of at least 0"),
        ({"temperature": -1.0}, "temperature must be"),
        ({"top_p": 2.0}, "top_p must be"),
    ],
)
def test_wrong_arguments_are_refused_at_once(how, message):
    with pytest.raises(ValueError, match=message):
        stream(model("gla"), **{"ids": [1], "max_new_tokens": 1, **how})


def test_a_prompt_is_read_in_pieces_and_an_edited_one_from_the_last_common_place(tmp_path):
    lm, ids = model("gla, softmax"), torch.randint(40, (1, 30))
    edited = torch.cat([ids[:, :22], (ids[:, 22:] + 1) % 40], 1)
    store = PrefixStore(tmp_path)
    for prompt, want in ((ids, [5, 10, 15, 20, 25, 29, 30]), (edited, [20, 25, 29, 30]), (ids, [29, 30])):
        tokens, told = stream(lm, prompt, max_new_tokens=6, temperature=0), []
        tokens.read_prompt(piece=5, store=store, tell=told.append)
        assert told == want
        tokens.read_prompt(tell=told.append)  # it has been read
        assert told == want
        assert torch.equal(torch.stack(list(tokens), 1), greedy(lm, prompt, 6)[:, 30:])
    told = []
    stream(lm, ids, max_new_tokens=1).read_prompt(piece=12, tell=told.append)
    assert told == [12, 24, 30]
    with pytest.raises(ValueError, match="piece must be an integer of at least 1"):
        stream(lm, ids, max_new_tokens=1).read_prompt(piece=0)
    with pytest.raises(TypeError, match=r"store must be a linattn.state.PrefixStore, but came as 'states'"):
        stream(lm, ids, max_new_tokens=1).read_prompt(store="states")
