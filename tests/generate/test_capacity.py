"""Captured steps of models with growing states: tokens and states equal the uncaptured model's, and no cache is copied."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from linattn import mixers
from linattn.generate import capacity, captured, fusion, step_graph, stream
from linattn.generate.captured import Choice, step_of
from linattn.generate.prefill import prefill
from linattn.mixers.attention.softmax import Softmax
from linattn.models import LanguageModel, LMConfig
from linattn.ops import one_query
from linattn.state import State
from tests.ops.errors import error
from tests.ops.test_one_query import in_pieces

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
HYBRIDS = {
    "hybrid": {"mixer": "gla, softmax, gated_deltanet", "layers": 3},
    "softmax": {"mixer": "softmax"},
    "groups": {"mixer": "gla, softmax", "mixer_options": {"softmax": {"kv_heads": 2}}},
    "one head of keys": {"mixer": "softmax, gla", "mixer_options": {"softmax": {"kv_heads": 1, "head_dim": 16, "rotated": 4}}},
    "gated": {"mixer": "gla, softmax", "mixer_options": {"softmax": {"norm_eps": 1e-6, "gated": True, "bias": True}}},
    "latent": {"mixer": "kda, mla"},
    "window": {"mixer": "softmax, mla, softmax", "layers": 3, "mixer_options": {"softmax": {"window": 5}}},
}


def model(device: str = "cpu", **options) -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(LMConfig(**{"vocab_size": 40, "dim": 32, "layers": 2, **options})).to(device).eval()


@pytest.fixture(autouse=True)
def always(monkeypatch):
    """Capture steps for any number of tokens."""
    monkeypatch.setattr(captured, "FROM", {"cuda": 1, "cpu": 1})


@pytest.fixture
def tight(monkeypatch):
    """Small cache capacities, so that larger steps are needed soon; returns the used ones."""
    monkeypatch.setattr(capacity, "LEAST", {"cuda": 8, "cpu": 8})
    monkeypatch.setattr(capacity, "AHEAD", 4)
    sizes, preallocated = [], capacity.preallocated
    monkeypatch.setattr(capacity, "preallocated", lambda state, slots, size: sizes.append(size) or preallocated(state, slots, size))
    return sizes


@pytest.fixture
def never(monkeypatch):
    return lambda: monkeypatch.setattr(captured, "refusal", lambda model: "the test says so")


def alike(ours: State, theirs: State, limit: float = 2e-5) -> None:
    for mine, wanted in zip(ours.layers, theirs.layers, strict=True):
        assert list(mine) == list(wanted)
        for name, t in mine.items():
            assert (t.shape, t.dtype, t.is_contiguous()) == (wanted[name].shape, wanted[name].dtype, True), name
            if t.is_floating_point():
                assert error(t.double(), wanted[name].double()) <= limit, name
            else:
                assert torch.equal(t, wanted[name]), name


def loaded(lm: LanguageModel, state: State, choose=lambda logits: logits.argmax(-1), tokens: int = 100) -> captured.Step:
    step = step_of(lm.model, lm.lm_head, state, tokens)
    assert not isinstance(step, str), step
    first = torch.ones(state.rows, dtype=torch.int64, device=state.position.device)
    step.load(step, state, first, torch.zeros_like(first, dtype=torch.bool), Choice(choose, "the test's"))
    return step


def read(lm: LanguageModel, rows: int, tokens: int, device: str = "cpu") -> State:
    with torch.inference_mode():
        return prefill(lm.model, torch.randint(40, (rows, tokens), device=device))[1]


@pytest.mark.parametrize(("device", "rows"), [("cpu", None), ("cpu", 3), pytest.param("cuda", 3, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", HYBRIDS)
def test_tokens_and_states_are_the_same_while_capacity_grows(name, rows, device, never, tight):
    lm = model(device, **HYBRIDS[name])
    ids = torch.randint(40, (6,) if rows is None else (rows, 6))

    def run(**how):
        tokens = stream(lm, ids, max_new_tokens=40, generator=torch.Generator(device).manual_seed(3), **how)
        return [t if rows is None else t.tolist() for t in tokens], tokens

    got, tokens = run(temperature=0)
    assert tokens.how.startswith("by a captured step") and tight == [16, 32, 64]
    drawn, _ = run(temperature=0.7, top_k=9)
    never()
    wanted, written = run(temperature=0)
    assert written.how == "as the model is written: the test says so"
    assert got == wanted and drawn == run(temperature=0.7, top_k=9)[0]
    assert tokens.nbytes == written.nbytes
    alike(tokens.state, written.state, 2e-5 if device == "cpu" else 1e-4)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["groups", "latent"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes(dtype, name, device):
    """In half precision its error against float64 is that of the uncaptured model."""
    lm = model(device, **HYBRIDS[name]).to(dtype)
    exact = model(device, **HYBRIDS[name]).to(dtype).double()
    ids, token = torch.randint(40, (4, 30), device=device), torch.randint(40, (4,), device=device)
    logits, ours, theirs = [], 0.0, 0.0
    with torch.inference_mode():
        (_, state), (_, right) = prefill(lm.model, ids), prefill(exact.model, ids)
        step = loaded(lm, state, lambda x: logits.append(x.clone()) or x.argmax(-1))
        for _ in range(8):
            step.tokens.copy_(token)
            step.run()
            (hidden, state), (best, right) = prefill(lm.model, token[:, None], state), prefill(exact.model, token[:, None], right)
            wanted = exact.lm_head(best)[:, -1]
            ours += error(logits[-1].double(), wanted)
            theirs += error(lm.lm_head(hidden)[:, -1].double(), wanted)
            token = wanted.argmax(-1)
    assert ours <= (1e-11 if dtype == torch.float64 else 1.5 * theirs)
    alike(step.state, state, {torch.bfloat16: 0.05, torch.float16: 0.01}.get(dtype, 1e-11))


@pytest.mark.parametrize("device", DEVICES)
def test_rows_of_different_lengths(device, never, tight):
    """Padding of shorter prompts and free slots are masked."""
    lm = model(device, **HYBRIDS["hybrid"])
    ids, mask = torch.randint(40, (3, 9), device=device), torch.ones(3, 9, dtype=torch.bool, device=device)
    mask[0, :4] = mask[1, 6:] = False
    with torch.inference_mode():
        _, padded = prefill(lm.model, ids, mask=mask)
        _, packed = prefill(lm.model, ids.reshape(1, -1), cu_seqlens=torch.tensor([0, 3, 16, 27], device=device))

    def run(state):
        tokens = stream(lm, torch.ones(3, 1, dtype=torch.int64), max_new_tokens=20, temperature=0, state=state)
        return [t.tolist() for t in tokens], tokens

    got = [run(padded), run(packed)]
    assert all(tokens.how.startswith("by a captured step") for _, tokens in got) and len(tight) > 2
    never()
    for (ours, tokens), state in zip(got, (padded, packed), strict=True):
        theirs, written = run(state)
        assert ours == theirs
        alike(tokens.state, written.state, 2e-5 if device == "cpu" else 1e-4)


@pytest.mark.parametrize("device", DEVICES)
def test_stops(device, never, tight):
    lm, ids = model(device, **HYBRIDS["hybrid"]), torch.randint(40, (3, 5))
    whole = torch.stack(list(stream(lm, ids, max_new_tokens=30, temperature=0)), 1)
    stop = whole[0, 6].item()

    def run():
        tokens = stream(lm, ids, max_new_tokens=30, temperature=0, stop=[stop, 99])
        return [t.tolist() for t in tokens], tokens.state.position.tolist()

    got = run()
    never()
    assert got == run()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seen", [3, 9, 12])  # below the cache capacity, at it, and beyond it
def test_a_state_on_the_way(seen, device, never, tight, tmp_path):
    lm, ids = model(device, **HYBRIDS["hybrid"]), torch.randint(40, (2, 6))

    def run():
        tokens = stream(lm, ids, max_new_tokens=30, temperature=0)
        first = [next(tokens).tolist() for _ in range(seen)]
        state = tokens.state
        return first, state, state.clone(), [t.tolist() for t in tokens]

    first, state, copy, rest = run()
    alike(state, copy, 0)  # after any later tokens
    state.save(tmp_path / "state", model=lm)
    again = State.load(tmp_path / "state", model=lm)
    alike(again, state, 0)
    forked = stream(lm, torch.tensor([rest[0]]).T.repeat_interleave(2, 0), max_new_tokens=15, temperature=0, state=again.fork(2))
    assert [t.tolist()[::2] for t in forked] == rest[1:16] and forked.how.startswith("by a captured step")
    one = stream(lm, torch.tensor([rest[0]]).T[1:], max_new_tokens=15, temperature=0, state=again.select([1]))
    assert [t.tolist() for t in one] == [t[1:] for t in rest[1:16]]
    never()
    wanted = run()
    assert (first, rest) == (wanted[0], wanted[3])
    alike(state, wanted[1], 2e-5 if device == "cpu" else 1e-4)


def test_two_at_once_have_caches_of_their_own_and_a_step_is_left_to_another(never):
    lm, prompts = model(**HYBRIDS["hybrid"]), torch.randint(40, (2, 6)).tolist()
    one, two = (stream(lm, p, max_new_tokens=12, temperature=0) for p in prompts)
    got = [[next(one) for _ in range(4)], [next(two) for _ in range(4)]]
    assert "by a captured step" in one.how and "by a captured step" in two.how and one._step is not two._step
    states = one.state, two.state
    one.give_up()
    got = [got[0] + list(one), got[1] + list(two)]
    never()
    for prompt, ours, state in zip(prompts, got, states, strict=True):
        tokens = stream(lm, prompt, max_new_tokens=12, temperature=0)
        first = [next(tokens) for _ in range(4)]
        alike(state, tokens.state)
        assert ours == first + list(tokens)


class Made(TorchDispatchMode):
    """Records the sizes in bytes of all allocated results."""

    def __init__(self, *known):
        super().__init__()
        self.known, self.sizes = {t.untyped_storage().data_ptr() for t in known}, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(t, torch.Tensor) and t.untyped_storage().data_ptr() not in self.known:
                self.sizes.append(t.untyped_storage().nbytes())
        return out


@pytest.fixture(params=["as on a CPU", "as on a GPU"])
def looks(request, monkeypatch):
    """Count reads of the cache."""
    if request.param == "as on a GPU":
        monkeypatch.setattr(one_query, "PIECE", 64)
        monkeypatch.setattr(one_query, "operator", lambda q, k, v, seen, taken: in_pieces(q, k, v, seen, one_query.PIECE))


@pytest.mark.usefixtures("looks")
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", ["softmax", "groups", "latent"])
def test_no_cache_is_copied(name, rows):
    lm = model(**HYBRIDS[name])
    state = read(lm, rows, 900)
    step = loaded(lm, state)
    caches = [(t, t.data_ptr()) for layer in step.buffers.layers for n, t in layer.items() if n in ("k", "v", "valid")]
    assert {t.shape[1] for t, _ in caches} == {1024}
    with Made(*(t for t, _ in caches)) as made:
        for _ in range(3):
            step.run()
    smallest = min(t.nbytes for t, _ in caches if t.is_floating_point())
    assert made.sizes and max(made.sizes) <= smallest / 2
    assert all(t.data_ptr() == place for t, place in caches)
    assert step.state.position.tolist() == [903] * rows


@pytest.mark.parametrize("name", ["hybrid", "groups", "latent"])
def test_fused_as_for_a_gpu(name, monkeypatch):
    """The graph for a GPU updates states in place, separately for each layer."""
    monkeypatch.setattr(one_query, "operator", lambda q, k, v, seen, taken: in_pieces(q, k, v, seen, 64))
    lm = model(**HYBRIDS[name])
    state, token = read(lm, 2, 100), torch.tensor([3, 5])
    buffers = capacity.preallocated(state, capacity.slots_of(lm.model), 128)
    capacity.fill(buffers, state, capacity.slots_of(lm.model))
    leaves = [t for layer in buffers.layers for t in layer.values()]

    def step(token, *leaves):
        rest = iter(leaves)
        old = State([{name: next(rest) for name in layer} for layer in buffers.layers])
        hidden, new = lm.model(token[:, None], old, return_state=True)
        return [lm.lm_head(hidden)[:, -1], *(new.layers[i][name] for i, layer in enumerate(buffers.layers) for name in layer)]

    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(fusion, "on_gpu", lambda t: True)
        module = step_graph.make_step_graph(step, [token, *leaves])
    growing = [i for i, t in enumerate(leaves) if t.ndim > 1 and t.shape[1] == 128]
    assert len(growing) == 3 * sum(bool(names) for names in capacity.slots_of(lm.model))
    assert {1 + i for i, t in enumerate(leaves) if t.dtype == torch.int64} <= set(module.meta["counters"])
    with torch.inference_mode():
        for _ in range(3):
            logits, *new = module(token, *leaves)
            assert all(new[i] is leaves[i] for i in growing)
            for i, (old, t) in enumerate(zip(leaves, new, strict=True), 1):
                old.copy_(old + 1 if i in module.meta["counters"] else t)
            hidden, state = prefill(lm.model, token[:, None], state)
            assert error(logits.double(), lm.lm_head(hidden)[:, -1].double()) <= 2e-5
    alike(capacity.trimmed(buffers, capacity.slots_of(lm.model), 103), state)


@pytest.mark.usefixtures("looks")
def test_what_an_earlier_text_left_is_not_met():
    lm = model(**HYBRIDS["softmax"])
    state = read(lm, 1, 20)
    step = loaded(lm, state)
    for layer in step.buffers.layers:
        layer["k"].fill_(torch.nan), layer["v"].fill_(torch.inf), layer["valid"].fill_(True)
    logits = []
    step.load(step, state, step.tokens, step.ended, Choice(lambda x: logits.append(x.clone()) or x.argmax(-1), "kept"))
    step.run()
    hidden, _ = prefill(lm.model, torch.tensor([[1]]), state)
    assert error(logits[0].double(), lm.lm_head(hidden)[:, -1].double()) <= 2e-5


def test_a_step_without_free_slots_raises():
    lm = model(**HYBRIDS["softmax"])
    step = loaded(lm, read(lm, 1, 254), tokens=1)
    step.run()
    assert step.free
    step.run()
    assert not step.free and step.state.position.tolist() == [256]
    with pytest.raises(RuntimeError, match="all 256 slots of this step are taken"):
        step.run()


def test_large_states_are_not_kept(monkeypatch):
    lm = model(**HYBRIDS["softmax"])
    small, large = read(lm, 1, 20), read(lm, 1, 600)
    first = loaded(lm, small)
    monkeypatch.setattr(captured, "HELD", 2 * first.held)
    assert loaded(lm, small) is first
    loaded(lm, large)
    assert [step for _, step in captured._steps[lm.model]] == [first]
    others = [loaded(lm, read(lm, rows, tokens)) for rows, tokens in ((2, 20), (1, 300))]
    assert [step for _, step in captured._steps[lm.model]] == others, "of large ones two"
    recurrent = model(mixer="gla")
    step = loaded(recurrent, read(recurrent, 300, 5))
    assert step.held > captured.HELD and loaded(recurrent, read(recurrent, 300, 5)) is step, "without a cache they are kept"


def test_capacity():
    for used in (1, 30, 255, 256, 257, 1000, 1500, 70000):
        for tokens in (1, 40, 500, 10**6):
            size = capacity.slots_for(used, tokens, "cpu")
            assert size == 256 or (size < 2.5 * max(used, 256) and size & (size - 1) == 0)
            assert size >= used + min(tokens, used // 4)
    assert capacity.slots_for(10, 10, "cuda") == 1024


class Own(Softmax):
    def attend(self, r, call):
        return super().attend(r, call)


def test_mixers_that_preallocate():
    assert mixers.create("softmax", dim=32).growing == mixers.create("mla", dim=32).growing == ("k", "v", "valid")
    assert not any(mixers.create(name, dim=32).growing for name in ("topk", "fox", "gla", "local"))
    assert Own(32).growing == Softmax(32, window=4).growing == Softmax(32, causal=False).growing == ()


@pytest.mark.parametrize("how", [{"mask": torch.ones(2, 1, dtype=torch.bool)}, {"tokens": 2}, {"cu_seqlens": torch.tensor([0, 1, 2])}])
def test_preallocated_states_belong_to_a_step(how):
    lm = model(**HYBRIDS["softmax"])
    state = read(lm, 2, 4)
    buffers = capacity.preallocated(state, capacity.slots_of(lm.model), 8)
    tokens = how.get("tokens", 1)
    x = torch.randn(1, 2, 32) if "cu_seqlens" in how else torch.randn(2, tokens, 32)
    with pytest.raises(ValueError, match="takes one token of every row at a time"):
        lm.model.layers[0].mixer(x, buffers.layers[0], return_state=True, **{k: v for k, v in how.items() if k != "tokens"})


def test_states_of_different_models_are_refused():
    lm = model(**HYBRIDS["softmax"])
    first, second = (read(lm, 1, n) for n in (5, 6))
    with pytest.raises(ValueError, match="different numbers of slots, 5 and 6"):
        capacity.taken(State([first.layers[0], second.layers[1]]), capacity.slots_of(lm.model))
