"""The pool of states against single generation: sequences that join, leave, fork or are cancelled do not affect others."""

import random

import pytest
import torch

from linattn import mixers
from linattn.generate import Pool, PoolFullError, deferral, rows, stream
from linattn.generate import prompts as reader
from linattn.generate.reading import Batches
from linattn.models import LanguageModel, LMConfig
from linattn.state import State
from tests.sweeps import swept

RECURRENT = [n for n in mixers.available() if mixers.info(n).resumable and mixers.info(n).recurrent]
GROWING = [n for n in mixers.available() if mixers.info(n).resumable and not mixers.info(n).recurrent]
POOLED = {"softmax", "mla"}
HYBRIDS = ["gla, softmax", "mamba2, mla"]
VOCABULARY = 40


def model(mixer: str = "gla", **options) -> LanguageModel:
    torch.manual_seed(0)
    options = {"layers": 2 if "," in mixer else 1, **options}
    return LanguageModel(LMConfig(vocab_size=VOCABULARY, dim=32, mixer=mixer, **options)).eval()


def prompts(count: int, longest: int = 14, seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(VOCABULARY) for _ in range(draw.randrange(1, longest + 1))] for _ in range(count)]


@pytest.fixture(params=["at once", "ahead", "in batches"])
def ahead(request, monkeypatch):
    """Process tokens at once, as on a CPU, or a step later, as on a GPU, where prompts are also read in batches, part by part, and
    writes of states are deferred.
    """
    made = Pool.__init__

    def init(self, *args, **kwargs):
        made(self, *args, **{"defer": request.param == "in batches" and not kwargs.get("lookup"), **kwargs})
        self._ahead = int(request.param != "at once")

    if request.param == "in batches":
        monkeypatch.setattr(deferral, "SLOTS", 3)
        monkeypatch.setattr(reader, "_batches", lambda model, fresh, block, slots: Batches(model.model, fresh, block, slots))

    monkeypatch.setattr(Pool, "__init__", init)


def alone(lm, ids, count, **how):
    return list(stream(lm, ids, max_new_tokens=count, **{"temperature": 0.0, **how}))


def drain(pool) -> list:
    return list(pool.run())


@pytest.mark.parametrize("mixer", [*HYBRIDS, *swept(RECURRENT)])
def test_greedy_tokens_equal_single_generation(mixer, monkeypatch):
    """With random arrivals, prompts in pieces, prefix cache hits and cancellation; one step is captured, for both rows."""
    monkeypatch.setattr(rows, "bucket", lambda count, slots: slots)
    lm, draw = model(mixer), random.Random(1)
    pool = Pool(lm, slots=2, prefix_bytes=1 << 22, block=4)
    given = prompts(3) + [[1, 2, 3, 4, 5, 6, 7, 8, *more] for more in prompts(3, 5)]
    requests = [pool.submit(given[0], max_new_tokens=7)]
    for _, _ in pool.run():
        while len(requests) < len(given) and draw.random() < 0.5:
            requests.append(pool.submit(given[len(requests)], max_new_tokens=7))
        if len(requests) == 3 and len(requests[1].tokens) >= 2:
            pool.cancel(requests[1])
    assert len(requests) == len(given) and pool.free == 2
    for ids, request in zip(given, requests, strict=True):
        wanted = alone(lm, ids, 7)
        assert request.tokens == wanted[: len(request.tokens)]
        assert request.reason == "length" if len(request.tokens) == 7 else request is requests[1]


@pytest.mark.parametrize("mixer", [*RECURRENT, *HYBRIDS])
def test_a_prefix_hit_changes_no_bit(mixer):
    lm, heard = model(mixer), []
    lm.lm_head.register_forward_hook(lambda module, args, out: heard.append(out.clone()))  # steps are then not captured either
    ids = prompts(1, 1)[0] + list(range(21))
    warm, cold = Pool(lm, slots=1, prefix_bytes=1 << 22, block=4), Pool(lm, slots=1, block=4)
    warm.submit([*ids[:17], 3, 3, 3, 3], max_new_tokens=1)
    drain(warm)
    heard.clear()
    found, reads = [], []
    for pool in (cold, warm):
        reads.append(0)
        read = pool._reader._prefill

        def counted(pieces, read=read):
            reads[-1] += sum(n for _, n in pieces)
            return read(pieces)

        pool._reader._prefill = counted
        request = pool.submit(ids, max_new_tokens=3)
        steps = pool.run()
        next(steps)
        found.append(pool.state(request))
        assert [token for _, token in steps] == request.tokens[1:]
    assert reads == [22, 6]  # of the first 21 tokens' blocks four are cached
    half = len(heard) // 2
    assert half == 3 and all(torch.equal(a, b) for a, b in zip(heard[:half], heard[half:], strict=True))
    for a, b in zip(*(state.layers for state in found), strict=True):
        assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_prefixes_stay_within_their_bytes_and_the_oldest_go_first():
    lm = model()
    one = Pool(lm, slots=1)._fresh.nbytes
    pool = Pool(lm, slots=1, prefix_bytes=2 * one, block=4)
    for first in range(5):
        pool.submit([first] * 9, max_new_tokens=1)
        drain(pool)
        assert pool._prefixes.nbytes <= 2 * one
    kept = [len(pool._prefixes.find(pool._prefixes.keys([first] * 9, ""))[1].layers) if n else 0
            for first in range(5) if (n := pool._prefixes.find(pool._prefixes.keys([first] * 9, ""))[0]) is not None]  # fmt: skip
    assert [bool(k) for k in kept] == [False] * 4 + [True]  # both blocks of the last


def test_a_block_is_known_by_all_that_stands_before_it():
    lm, block = model(), [5, 6, 7, 8]
    pool = Pool(lm, slots=1, prefix_bytes=1 << 22, block=4)
    for ids in ([1, 2, 3, 4, *block, 9], [4, 3, 2, 1, *block], [1, 2, 3, 4, *block], block):  # the third one's last block is read again
        request = pool.submit(ids, max_new_tokens=3)
        drain(pool)
        assert request.tokens == alone(lm, ids, 3)
    keys = [pool._prefixes.keys([*first, *block, 0], "") for first in ([1, 2, 3, 4], [4, 3, 2, 1])]
    assert not set(keys[0]) & set(keys[1])


def test_salts_separate_users():
    lm = model()
    pool, ids = Pool(lm, slots=1, prefix_bytes=1 << 22, block=4), list(range(9))
    pool.submit(ids, max_new_tokens=1, salt="one")
    drain(pool)
    for salt, blocks in (("one", 2), ("two", 0), ("", 0)):
        assert pool._prefixes.find(pool._prefixes.keys(ids, salt))[0] == 4 * blocks


def test_new_weights_drop_cached_prefixes():
    lm = model()
    pool, ids = Pool(lm, slots=1, prefix_bytes=1 << 22, block=4), list(range(9))
    first = pool.submit(ids, max_new_tokens=4)
    drain(pool)
    with torch.no_grad():
        for p in lm.parameters():
            p.mul_(-1.5)
    second = pool.submit(ids, max_new_tokens=4)
    drain(pool)
    assert second.tokens == alone(lm, ids, 4) != first.tokens


@pytest.mark.parametrize("how", [{"temperature": 1.0}, {"temperature": 0.7, "top_k": 9, "top_p": 0.8}])
@pytest.mark.parametrize("mixer", ["gated_deltanet", "mamba2", "gla, softmax"])
def test_seeded_rows_are_the_same_whatever_runs_beside_them(mixer, how):
    lm, ids = model(mixer), [1, 2, 3]
    wanted = alone(lm, ids, 12, generator=torch.Generator().manual_seed(5), **how)
    pool = Pool(lm, slots=4, block=4)
    others = [pool.submit(p, max_new_tokens=n, temperature=t, seed=n)
              for p, n, t in zip(prompts(6), (3, 5, 8, 2, 9, 6), (0.0, 1.0, 0.5, 2.0, 0.0, 1.0), strict=True)]  # fmt: skip
    request = pool.submit(ids, max_new_tokens=12, seed=5, **how)
    drain(pool)
    assert request.tokens == wanted
    greedy = [r for r in others if r.sampling.temperature == 0]
    assert all(r.tokens == alone(lm, r.ids, r.max_new_tokens) for r in greedy)


@pytest.mark.parametrize("options", [{"mixer": "gated_deltanet"}, {"mixer": "mamba"}, {"mixer": "gla, softmax"}, {"ffn": "switch"}])
@pytest.mark.parametrize("seen", [False, True], ids=["captured", "written"])
def test_a_poisoned_slot_shows_in_no_other_row(options, seen, ahead):
    lm = model(**options)
    if seen:
        lm.lm_head.register_forward_hook(lambda module, args, out: None)
    pool, given = Pool(lm, slots=4, block=4), prompts(6)

    def poison():
        for t in (*pool._rows._tensors(), *(pool._rows._deferral.tensors if pool._rows._deferral else ())):
            if t.is_floating_point():
                t[len(pool._active) :] = torch.nan

    requests = [pool.submit(ids, max_new_tokens=n) for ids, n in zip(given, (9, 2, 5, 3, 6, 4), strict=True)]
    poison()
    for _, _ in pool.run():
        poison()
    for ids, request in zip(given, requests, strict=True):
        assert request.tokens == alone(lm, ids, request.max_new_tokens)


def test_slots_of_softmax_are_moved_together_where_they_run_out(ahead):
    """Texts longer than the free slots, one that joins with more tokens than used slots, and states read meanwhile."""
    lm = model("softmax, gla")
    pool = Pool(lm, slots=3, block=8, context=40)
    given = [[1], list(range(20)), [4, 5], list(range(30)), [6]]
    requests = [pool.submit(ids, max_new_tokens=n) for ids, n in zip(given, (39, 20, 30, 10, 38), strict=True)]
    most = 0
    for request, _ in pool.run():
        most = max(most, pool._rows._used)
        if request in pool._active and len(request.tokens) == 10:
            state = pool.state(request)
            read = torch.tensor([[*request.ids, *request.tokens[:-1]]])
            with torch.no_grad():
                wanted = lm.model(read, return_state=True)[1]
            assert all(torch.allclose(a[k], b[k], atol=1e-5) for a, b in zip(state.layers, wanted.layers, strict=True) for k in a)
    assert most <= pool._rows._size == 40 + 64
    for ids, request in zip(given, requests, strict=True):
        assert request.tokens == alone(lm, ids, request.max_new_tokens)


def test_slots_of_softmax_suffice_for_any_number_of_requests(ahead):
    """With always one or two decoding sequences: the slots are never all free."""
    lm = model("softmax, gla")
    pool = Pool(lm, slots=2, block=8, context=12)
    requests = [pool.submit([n], max_new_tokens=4 if n == 0 else 8) for n in range(30)]  # they take turns
    moved = 0
    last = 0
    for _, _ in pool.run():
        moved += 0 < pool._rows._used < last
        last = pool._rows._used
    assert moved and sum(len(r.tokens) for r in requests) > 2 * pool._rows._size
    assert all(r.tokens == alone(lm, r.ids, r.max_new_tokens) for r in requests)


def test_forks_continue_on_their_own(ahead):
    lm, ids = model("gated_deltanet"), list(range(11))
    pool = Pool(lm, slots=3, block=4)
    first = pool.submit(ids, max_new_tokens=9, temperature=1.0, seed=1)
    early = [pool.fork(first, seed=seed) for seed in (2, 3, 4)]  # while it waits: the prompt is read once
    late, waits, known = None, None, []
    for request, _ in pool.run():
        if request is first and len(first.tokens) == 4:
            late = pool.fork(first, seed=6)
            waits, known = pool.fork(late, seed=7), list(late.tokens)
            assert pool.free == 0 and pool.waiting == 3
    for request, seed in zip([first, *early], (1, 2, 3, 4), strict=True):
        assert request.tokens == alone(lm, ids, 9, temperature=1.0, generator=torch.Generator().manual_seed(seed))
    assert 4 <= len(known) <= 5 and first.tokens[: len(known)] == known
    for request, seed in ((late, 6), (waits, 7)):
        wanted = alone(lm, ids + known, 9 - len(known), temperature=1.0, generator=torch.Generator().manual_seed(seed))
        assert request.tokens == known + wanted


def test_a_state_continues_in_another_request(ahead):
    lm, ids = model("gla, softmax"), list(range(9))
    pool = Pool(lm, slots=2)
    first = pool.submit(ids, max_new_tokens=6)
    state, known = next((pool.state(first), list(first.tokens)) for _, _ in pool.run() if len(first.tokens) == 3)
    assert isinstance(state, State) and int(state.position) == 9 + len(known) - 1
    drain(pool)
    second = pool.submit(known[-1:], max_new_tokens=6 - len(known), state=state)
    drain(pool)
    assert known + second.tokens == first.tokens


def test_cancelling_frees_the_slot_at_once_at_every_stage(ahead):
    pool = Pool(model(), slots=1, block=4)
    decodes = pool.submit([1, 2, 3], max_new_tokens=50)
    waits = pool.submit([1], max_new_tokens=5)
    steps = pool.run()
    next(steps)
    assert pool.free == 0 and pool.waiting == 1
    pool.cancel(waits)
    assert pool.waiting == 0 and waits.reason == "cancelled"
    pool.cancel(decodes)
    assert pool.free == 1 and list(steps) == [] and len(decodes.tokens) <= 2
    reads = pool.submit(list(range(20)), max_new_tokens=5)
    with torch.no_grad():
        pool._advance()
    assert pool.free == 0 and not reads.tokens
    twin = pool.fork(reads)
    pool.cancel(reads)
    assert [r for r, _ in pool.run()] == [twin] * 5 and not reads.tokens and pool.free == 1
    pool.cancel(twin)  # it has ended: nothing happens
    assert twin.reason == "length"


def test_reading_does_not_hold_up_decoding():
    """At most a block of other prompts is read between two tokens of a sequence."""
    lm = model()
    pool, reads = Pool(lm, slots=4, block=8), []
    read = pool._reader._prefill
    pool._reader._prefill = lambda pieces: (reads.append(sum(n for _, n in pieces)), read(pieces))[1]
    short = pool.submit([1, 2], max_new_tokens=30)
    between = []
    for request, _ in pool.run():
        if request is short:
            between.append(sum(reads))
            if len(short.tokens) == 3:
                longs = [pool.submit(list(range(40)) + [i], max_new_tokens=2) for i in range(3)]
    gaps = [b - a for a, b in zip(between, between[1:], strict=False)]
    assert max(gaps) <= 8 and sum(reads) == 2 + 3 * 41 and max(reads) == 8
    assert all(r.tokens == alone(lm, r.ids, 2) for r in longs)


def test_short_prompts_are_read_in_one_call():
    pool, reads = Pool(model("gated_deltanet"), slots=8, block=32), []
    read = pool._reader._prefill
    pool._reader._prefill = lambda pieces: (reads.append([n for _, n in pieces]), read(pieces))[1]
    for n in (5, 3, 9, 2):
        pool.submit(list(range(n)), max_new_tokens=2)
    drain(pool)
    assert reads == [[5, 3, 9, 2]]


@pytest.mark.parametrize("mixer", ["gated_deltanet", "gla", "mamba2", "retnet", "rwkv7", "gla, softmax"])
def test_states_that_are_written_every_few_steps(mixer, monkeypatch):
    """A step for fewer rows, changed weights and copies of states include pending tokens."""
    monkeypatch.setattr(rows, "SMALLER", {"cpu": 1})
    lm = model(mixer)
    pool, given = Pool(lm, slots=4, defer=True), prompts(4)
    requests = [pool.submit(ids, max_new_tokens=n) for ids, n in zip(given, (60, 5, 9, 18), strict=True)]
    copied = []
    for request, _ in pool.run():
        if request is requests[0] and len(request.tokens) in (14, 30, 31):
            copied.append((pool.state(request), len(request.tokens) - 1))
    assert {1, 2, 4} == set(pool._rows._steps)
    assert (mixer == "rwkv7") == (not pool._rows._deferral.nbytes)  # its rule does not support deferral
    for ids, request in zip(given, requests, strict=True):
        assert request.tokens == alone(lm, ids, len(request.tokens))
    for state, n in copied:
        wanted = lm.model(torch.tensor([[*given[0], *requests[0].tokens[:n]]]), return_state=True)[1]
        for own, expected in zip(state.layers, wanted.layers, strict=True):
            torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-5)


def test_layers_write_their_states_at_different_steps(monkeypatch):
    monkeypatch.setattr(deferral, "SLOTS", 4)
    pool = Pool(model("gla", layers=3), slots=1, defer=True)
    pool.submit([1, 2, 3], max_new_tokens=20)
    seen = [[layer["S"].clone() for layer in pool._rows._layers] for _ in pool.run()]
    written = [[not torch.equal(a, b) for a, b in zip(*pair, strict=True)] for pair in zip(seen[1:], seen[2:-1], strict=False)]
    assert all(sum(step) <= 1 for step in written)
    assert all(3 <= sum(step[layer] for step in written) <= 5 for layer in range(3))


def test_drafts_and_deferred_states_exclude_each_other():
    with pytest.raises(ValueError, match=r"^defer=True cannot be combined with lookup=True: drafts need states that are up to date$"):
        Pool(model(), slots=2, lookup=True, defer=True)


def test_a_full_queue_is_an_error_and_not_memory():
    pool = Pool(model(), slots=2, queue=3)
    requests = [pool.submit([1], max_new_tokens=2) for _ in range(5)]
    with pytest.raises(PoolFullError, match="3 requests wait|5 requests wait"):
        pool.submit([1], max_new_tokens=2)
    with pytest.raises(PoolFullError, match="queue=3"):
        pool.fork(requests[0])
    pool.cancel(requests[4])
    pool.submit([1], max_new_tokens=2)
    assert len(drain(pool)) == 10 and pool.free == 2


@pytest.mark.gpu
@pytest.mark.parametrize("how", [{}, {"temperature": 1.0, "top_k": 9}])
@pytest.mark.parametrize("mixer", ["gla", "gated_deltanet", "mamba2", "rwkv7", "gla, softmax"])
@pytest.mark.parametrize("defer", [False, True])
def test_on_a_gpu(mixer, how, defer, monkeypatch):
    """CUDA graphs of several numbers of rows, a step in flight, forks, cancellation, and states written every few steps."""
    monkeypatch.setattr(deferral, "SLOTS", 3)
    lm = model(mixer).cuda()
    pool, given = Pool(lm, slots=5, prefix_bytes=1 << 22, block=8, defer=defer), prompts(12, 30)
    requests = [pool.submit(ids, max_new_tokens=3 + i % 9, seed=i, **how) for i, ids in enumerate(given)]
    for request, _ in pool.run():
        if request is requests[1] and len(request.tokens) == 2:
            pool.cancel(request)
            requests.append(pool.fork(requests[4], seed=4) if not requests[4].done else requests[4])
    assert pool.free == 5
    for i, request in enumerate(requests[:12]):
        generator = torch.Generator("cuda").manual_seed(i)
        wanted = alone(lm, request.ids, 3 + i % 9, generator=generator, **how)
        assert request.tokens == wanted[: len(request.tokens)] and (request.reason == "length" or i == 1)
    assert len(requests[12].tokens) == len(requests[4].tokens)


@pytest.mark.slow
@pytest.mark.parametrize("mixer", ["gla", "gla, softmax"])
def test_memory_is_flat_over_many_requests(mixer):
    import gc
    import resource

    pool, draw = Pool(model(mixer), slots=16, prefix_bytes=1 << 18, block=32, queue=64), random.Random(0)
    left, sizes = 10_000, []
    while left:
        for _ in range(min(left, 50)):
            request = pool.submit([draw.randrange(4) for _ in range(draw.randrange(1, 40))], max_new_tokens=draw.randrange(1, 6))
            if draw.random() < 0.1:
                pool.cancel(request)
            left -= 1
        drain(pool)
        assert pool.free == 16 and pool.waiting == 0
        if left in (5_000, 0):  # after the first half the cache is full
            gc.collect()
            sizes.append((pool.nbytes, len(gc.get_objects()), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss))
    (kept, objects, peak), (kept_after, objects_after, peak_after) = sizes
    assert kept_after == kept and objects_after - objects <= 500  # detects a leak of one object in ten requests
    assert peak_after - peak <= 20 << 10  # KiB: detects a leak of 4 KiB a request
