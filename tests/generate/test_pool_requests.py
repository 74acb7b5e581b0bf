"""Arguments of a pool's requests: stops, texts, sampling, and errors."""

import pytest
import torch

from linattn import mixers
from linattn.data import ByteCodec
from linattn.generate import Pool, complete, stream
from linattn.generate.rows import SMALLER, Rows, bucket
from linattn.models import LanguageModel, LMConfig
from tests.generate.test_pool import GROWING, POOLED, alone, drain, model


@pytest.fixture(scope="module")
def lm():
    torch.manual_seed(0)
    return LanguageModel(LMConfig(vocab_size=256, dim=32, layers=1, mixer="gla")).eval()


def test_stop_tokens_end_a_sequence_and_are_returned(lm):
    free = alone(lm, [65], 12)
    stop = next(t for i, t in enumerate(free) if i > 2 and t not in free[:i])
    pool = Pool(lm, slots=2)
    request, other = (pool.submit([65], max_new_tokens=12, stop=s) for s in ([stop], []))
    drain(pool)
    assert request.tokens == free[: free.index(stop) + 1] and request.reason == "stop"
    assert other.tokens == free and other.reason == "length"


def test_stop_texts_end_a_sequence_and_are_cut_off(lm):
    pool = Pool(lm, slots=2, codec=ByteCodec())
    how = {"max_new_tokens": 60, "temperature": 1.0, "seed": 0}
    free = pool.submit([65], **how)
    drain(pool)
    assert free.text == ByteCodec().decode(free.tokens)
    stop = free.text[20:22]  # begins in one token and ends in another
    request = pool.submit([65], stop=[stop, "not there at all"], **how)
    drain(pool)
    assert request.reason == "stop" and request.text == free.text[: free.text.find(stop)]
    assert request.tokens == free.tokens[: len(request.tokens)] and len(request.tokens) < 60


def test_no_token_is_asked_for(lm):
    pool = Pool(lm, slots=1)
    request = pool.submit([1], max_new_tokens=0)
    assert request.done and drain(pool) == []


def test_who_stops_early_finds_the_other_tokens_later(lm):
    pool = Pool(lm, slots=3)
    requests = [pool.submit([n], max_new_tokens=4) for n in range(3)]
    seen = [next(pool.run()) for _ in range(5)] + drain(pool)
    assert [[t for r, t in seen if r is request] for request in requests] == [request.tokens for request in requests]


def test_requests_from_other_threads(lm):
    import threading

    pool, requests = Pool(lm, slots=2), []
    first = pool.submit([1], max_new_tokens=200)
    thread = threading.Thread(target=lambda: requests.extend(pool.submit([n], max_new_tokens=3) for n in range(4)))
    steps = pool.run()
    next(steps)
    thread.start()
    for request, _ in steps:
        if request is first and len(requests) == 4 and all(r.done for r in requests):
            pool.cancel(first)
    thread.join()
    drain(pool)
    assert all(r.tokens == alone(lm, r.ids, 3) for r in requests)


def test_a_twin_of_transformers():
    pytest.importorskip("transformers")
    from linattn.hf import LinattnForCausalLM, LMConfig

    torch.manual_seed(0)
    twin = LinattnForCausalLM(LMConfig(vocab_size=40, dim=32, layers=2, mixer="gated_deltanet")).eval()
    pool = Pool(twin, slots=2)
    request = pool.submit([1, 2, 3], max_new_tokens=6)
    drain(pool)
    assert request.tokens == list(stream(twin, [1, 2, 3], max_new_tokens=6, temperature=0.0))


@pytest.mark.parametrize("mixer", GROWING)
def test_what_cannot_be_pooled_is_refused_by_name(mixer):
    lm = model(f"gla, {mixer}")
    if mixer in POOLED:
        Pool(lm, slots=1)
        return
    with pytest.raises(ValueError, match="cannot be pooled: the state of layer 1 grows"):
        Pool(lm, slots=1)


def test_experts_of_limited_capacity_are_refused():
    with pytest.raises(ValueError, match=r"cannot be pooled: model\.layers\.0\.ffn has an eval_capacity"):
        Pool(model(ffn="switch", ffn_options={"switch": {"eval_capacity": 1.0}}), slots=1)


@pytest.mark.parametrize(("how", "words"), [
    ({"ids": []}, "at least one token"), ({"ids": [[1, 2]]}, "prompt"), ({"ids": [256]}, "ids must be from 0 to 255"),
    ({"ids": [0.5]}, "ids"),
    ({"max_new_tokens": -1}, "max_new_tokens"), ({"temperature": -1.0}, "temperature"), ({"top_p": 0.0}, "top_p"), ({"seed": -1}, "seed"),
    ({"stop": "abc"}, "stop"), ({"stop": ["abc"]}, "codec"), ({"stop": [""]}, "codec"), ({"salt": 3}, "salt"), ({"state": 3}, "state"),
])  # fmt: skip
def test_errors_of_submit_queue_nothing(lm, how, words):
    pool = Pool(lm, slots=1)
    with pytest.raises((ValueError, TypeError), match=words):
        pool.submit(**{"ids": [1], "max_new_tokens": 2, **how})
    assert pool.waiting == 0


@pytest.mark.parametrize("how", [{"slots": 0}, {"slots": 1.5}, {"prefix_bytes": -1}, {"block": 0}, {"queue": -1}, {"context": 0}])
def test_errors_of_the_pool_name_the_argument(lm, how):
    with pytest.raises(ValueError, match=next(iter(how))):
        Pool(lm, **how)


def test_other_errors(lm):
    with pytest.raises(TypeError, match="model"):
        Pool(torch.nn.Linear(2, 2))
    with pytest.raises(TypeError, match="codec"):
        Pool(lm, codec=3)
    with pytest.raises(ValueError, match="at least one character"):
        Pool(lm, codec=ByteCodec()).submit([1], max_new_tokens=1, stop=[""])
    pool, other = Pool(lm, slots=1), Pool(lm, slots=1)
    request = other.submit([1], max_new_tokens=2)
    for use in (pool.cancel, pool.fork, pool.state):
        with pytest.raises(ValueError, match="must be of this pool"):
            use(request)
        with pytest.raises(TypeError, match="what submit returned"):
            use(3)
    with pytest.raises(ValueError, match="not been read yet"):
        other.state(request)
    with pytest.raises(ValueError, match="needs a codec"):
        _ = request.text
    drain(other)
    for use in (other.fork, other.state):
        with pytest.raises(ValueError, match="it has ended: length"):
            use(request)
    _, state = lm(torch.tensor([[1], [2]]), return_state=True)
    for given in (state, model("gla, gla")(torch.tensor([[1]]), return_state=True)[1]):
        with pytest.raises(ValueError, match="one row of a state of this pool's model"):
            pool.submit([1], max_new_tokens=1, state=given)
    with pytest.raises(ValueError, match="context is 8"):
        Pool(model("softmax"), slots=1, context=8).submit([1, 2, 3], max_new_tokens=6)


@pytest.mark.parametrize("slots", [2, 64])
def test_many_prompts_at_once(lm, slots):
    given = [[1], [2, 3, 4], torch.tensor([5, 6])]
    found = complete(lm, given, max_new_tokens=5, slots=slots)
    assert [r.tokens for r in found] == [alone(lm, ids, 5) for ids in given]
    found = complete(lm, given, max_new_tokens=5, samples=2, temperature=1.0, seed=7, slots=slots, codec=ByteCodec())
    for n, request in enumerate(found):
        wanted = alone(lm, given[n // 2], 5, temperature=1.0, generator=torch.Generator().manual_seed(7 + n))
        assert request.tokens == wanted and request.text == ByteCodec().decode(wanted)
    assert complete(lm, [], max_new_tokens=5) == [] and complete(lm, [[1]], max_new_tokens=0, samples=2)[1].tokens == []


@pytest.mark.parametrize(("prompts", "how", "words"), [
    (torch.tensor([[1]]), {}, "list of prompts"), ("ab", {}, "list of prompts"), ([3], {}, "ids must be a prompt"),
    ([[]], {}, "at least one"), ([[1]], {"samples": 0}, "samples"), ([[1]], {"slots": 0}, "slots"),
    ([[1]], {"max_new_tokens": -1}, "max_new_tokens"),
])  # fmt: skip
def test_errors_of_many_prompts(lm, prompts, how, words):
    with pytest.raises((TypeError, ValueError), match=words):
        complete(lm, prompts, **{"max_new_tokens": 2, **how})


def test_a_smaller_step_is_captured_after_many_larger_ones(lm, monkeypatch):
    made = []
    monkeypatch.setattr(Rows, "_step", lambda self, n: made.append(n) or (lambda: torch.zeros(n, 256)))
    pool = Pool(lm, slots=8)
    requests = [pool.submit([n], max_new_tokens=300 if n < 3 else 2) for n in range(8)]
    drain(pool)
    assert made == [8, 4]  # at once for all that wait, then for the three that are left
    assert all(r.reason == "length" for r in requests) and pool._rows._spared[4] == SMALLER["cpu"] + 1


def test_buckets_are_few_and_hold_their_rows():
    for slots in (1, 2, 3, 7, 64, 100):
        sizes = [bucket(n, slots) for n in range(1, slots + 1)]
        assert all(n <= size <= slots for n, size in enumerate(sizes, 1)) and len(set(sizes)) <= slots.bit_length() + 1
    assert mixers.info("softmax").recurrent is False  # so that POOLED are not among the constant ones
