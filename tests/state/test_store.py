"""The store of prefixes: finds the longest, removes the oldest, and supports several processes."""

import os

import pytest
import torch

import linattn
from linattn import LanguageModel, State
from linattn.models import LMConfig
from linattn.state import PrefixStore

TOKENS = list(range(10))


def lm(**changes) -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(LMConfig(**{"vocab_size": 20, "dim": 32, "layers": 1, "mixer": "gla", **changes}))


@pytest.fixture
def model() -> LanguageModel:
    return lm()


@pytest.fixture
def store(tmp_path) -> PrefixStore:
    return PrefixStore(tmp_path / "states")


def state_of(value: float, size: int = 8, rows: int = 1) -> State:
    return State([{"S": torch.full((rows, size), float(value)), "position": torch.zeros(rows, dtype=torch.int64)}])


def value(found: tuple[int, State | None]) -> tuple[int, list[float]]:
    n, state = found
    return n, [] if state is None else state.layers[0]["S"][:, 0].tolist()


def files(store: PrefixStore) -> list[int]:
    return sorted(int(path.name.split("-")[0]) for path in store.folder.glob("*.safetensors"))


def test_the_longest_is_found(store, model):
    assert store.find(model, [TOKENS]) == (0, None)
    for n in (2, 5, 8):
        store.put(model, TOKENS[:n], state_of(n))
    assert value(store.find(model, [TOKENS])) == (8, [8.0])
    assert value(store.find(model, [TOKENS[:8]])) == (8, [8.0])
    assert value(store.find(model, [TOKENS[:7]])) == (5, [5.0])
    assert value(store.find(model, [[*TOKENS[:7], 19]])) == (5, [5.0])
    assert store.find(model, [[19, *TOKENS]]) == (0, None)
    assert store.find(model, [TOKENS[:1]]) == (0, None)
    assert value(PrefixStore(store.folder).find(model, [TOKENS])) == (8, [8.0])


def test_rows_need_the_same_length(store, model):
    store.put(model, TOKENS[:3], state_of(1))
    store.put(model, TOKENS[:6], state_of(2))
    other = [7, *TOKENS[1:]]
    assert store.find(model, [TOKENS, other]) == (0, None)
    store.put(model, other[:3], state_of(3))
    assert value(store.find(model, [TOKENS, other])) == (3, [1.0, 3.0])
    store.put(model, other[:6], state_of(4, size=9))  # padding beside the tokens: cannot be combined
    assert value(store.find(model, [TOKENS, other])) == (3, [1.0, 3.0])


@pytest.mark.parametrize("what", ["weights", "config", "dtype", "version"])
def test_everything_that_a_state_follows_from_is_in_the_key(what, store, model, monkeypatch):
    store.put(model, TOKENS, state_of(1))
    if what == "weights":
        torch.nn.init.zeros_(model.lm_head.weight)
    elif what == "config":
        model = lm(norm_eps=1e-6)  # weights of the same names and shapes
    elif what == "dtype":
        model = model.double()
    else:
        monkeypatch.setattr(linattn, "__version__", "99")
    assert store.find(model, [TOKENS]) == (0, None)
    assert files(store) == [10]  # others may use it


def test_the_bytes_are_bounded_and_the_least_recently_used_goes(tmp_path, model):
    store = PrefixStore(tmp_path)
    store.put(model, TOKENS[:1], state_of(1, 4096))
    one = store.nbytes
    assert one > 4096 * 4
    store = PrefixStore(tmp_path, max_bytes=3 * one + 100)
    for n in (2, 3):
        store.put(model, TOKENS[:n], state_of(n, 4096))
    assert files(store) == [1, 2, 3]
    assert value(store.find(model, [TOKENS[:1]])) == (1, [1.0])  # used, so 2 is the oldest
    store.put(model, TOKENS[:4], state_of(4, 4096))
    assert files(store) == [1, 3, 4]
    store.put(model, TOKENS[:3], state_of(3, 4096))  # kept again
    store.put(model, TOKENS[:5], state_of(5, 4096))
    assert files(store) == [3, 4, 5]
    assert store.nbytes <= store.max_bytes
    store.put(model, TOKENS[:6], state_of(6, 4096 * 4))  # larger than all
    assert files(store) == [3, 4, 5]
    PrefixStore(tmp_path, max_bytes=one + 100).put(model, TOKENS[:7], state_of(7, 4096))
    assert files(store) == [7]


def test_a_smaller_bound_holds_from_the_next_state_on(store, model):
    store.put(model, TOKENS[:2], state_of(1, size=1000))
    smaller = PrefixStore(store.folder, max_bytes=100)
    smaller.put(model, TOKENS[:3], state_of(2, size=1000))  # too small for it
    assert smaller.nbytes == 0


def test_damaged_files_go_and_what_is_not_ours_stays(store, model, tmp_path):
    store.put(model, TOKENS[:4], state_of(4))
    store.put(model, TOKENS[:6], state_of(6))
    path = next(store.folder.glob("6-*"))
    path.write_bytes(path.read_bytes()[:-5])
    (store.folder / "notes.txt").write_text("mine")
    (store.folder / ".old.part").write_text("of a process that died")
    (store.folder / f"9-{'0' * 64}.safetensors").symlink_to(tmp_path / "elsewhere")
    assert value(store.find(model, [TOKENS])) == (4, [4.0])
    assert files(store) == [4, 9]
    store.put(model, TOKENS[:6], state_of(6))
    assert value(store.find(model, [TOKENS])) == (6, [6.0])
    assert sorted(p.name for p in store.folder.iterdir() if p.suffix in (".txt", ".part")) == ["notes.txt"]


def test_wrong_arguments(store, model, tmp_path):
    with pytest.raises(ValueError, match="max_bytes must be an integer of at least 1, but came as 0"):
        PrefixStore(tmp_path, max_bytes=0)
    for bound in (True, 1e9, "1 GB"):
        with pytest.raises(TypeError, match=f"max_bytes must be an integer, but came as {bound!r}"):
            PrefixStore(tmp_path, max_bytes=bound)
    (tmp_path / "states.txt").touch()
    with pytest.raises(NotADirectoryError, match=r"states\.txt is a file, not a folder for states"):
        PrefixStore(tmp_path / "states.txt")
    with pytest.raises(ValueError, match="state must have one row, but came with 2"):
        store.put(model, TOKENS, state_of(1, rows=2))


PROCESSES = """
import os, random, sys
import torch
from linattn import LanguageModel, State
from linattn.models import LMConfig
from linattn.state import PrefixStore

folder, bound = sys.argv[1], int(sys.argv[2])
torch.manual_seed(0)
model = LanguageModel(LMConfig(vocab_size=20, dim=32, layers=1, mixer="gla"))

def use(seed):
    store, draw, hits = PrefixStore(folder, max_bytes=bound), random.Random(seed), 0
    for _ in range(40):
        tokens = list(range(draw.randint(1, 9)))
        n, state = store.find(model, [tokens])
        if n:
            assert n <= len(tokens) and state.layers[0]["S"].unique().tolist() == [float(n)], (n, state)
            hits += 1
        if n < len(tokens):
            full = torch.full((1, 512), float(len(tokens)))
            store.put(model, tokens, State([{"S": full, "position": torch.zeros(1, dtype=torch.int64)}]))
        assert store.nbytes <= bound
    assert hits > 0

store = PrefixStore(folder, max_bytes=bound)
store.put(model, [0], State([{"S": torch.full((1, 512), 1.0), "position": torch.zeros(1, dtype=torch.int64)}]))  # all is imported now
children = []
for seed in range(3):  # all begin together
    children.append(os.fork())
    if not children[-1]:
        code = 1
        try:
            use(seed)
            code = 0
        finally:
            if code:
                import traceback

                traceback.print_exc()
            os._exit(code)
sys.exit(max(os.waitpid(child, 0)[1] for child in children) > 0)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="one interpreter forks the others")
def test_several_processes_at_once(tmp_path, programs):
    bound, environment = 16_000, {**os.environ, "OMP_NUM_THREADS": "1"}
    done = programs.python("-c", PROCESSES, tmp_path, bound, env=environment)
    assert done.returncode == 0, done.stderr
    store = PrefixStore(tmp_path, max_bytes=bound)
    assert 0 < store.nbytes <= bound
    assert not list(tmp_path.glob("*.part")) + list(tmp_path.glob(".*.part"))
