"""State: selection and forking of rows, damaged files, and support of compile and pytrees."""

import json
import os

import pytest
import torch
import torch.utils._pytree as pytree
from safetensors.torch import save_file

from linattn import LanguageModel, State
from linattn.hf import LinattnForCausalLM
from linattn.hf import LMConfig as HFConfig
from linattn.models import LMConfig
from linattn.state.identity import identity


def make(rows: int = 3) -> State:
    g = torch.Generator().manual_seed(0)
    layer = {
        "S": torch.randn(rows, 2, 4, 5, generator=g),
        "conv": torch.randn(rows, 3, 8, generator=g).to(torch.bfloat16),
        "position": torch.arange(rows) + 7,
    }
    return State([layer, {}, {"S": torch.randn(rows, 2, 4, 5, generator=g).mT, "position": torch.arange(rows) + 7}])


def same(a: State, b: State) -> bool:
    ours, theirs = ([(i, n, t) for i, layer in enumerate(s.layers) for n, t in layer.items()] for s in (a, b))
    return len(a.layers) == len(b.layers) and all(
        i == j and n == m and t.dtype == u.dtype and torch.equal(t, u) for (i, n, t), (j, m, u) in zip(ours, theirs, strict=True)
    )


def test_what_it_says_of_itself():
    state = make()
    assert state.rows == 3
    assert state.position.tolist() == [7, 8, 9]
    assert state.nbytes == 3 * (2 * 4 * 5 * 4 * 2 + 3 * 8 * 2 + 2 * 8)
    assert State([{}, {}]).rows == 0
    with pytest.raises(ValueError, match="position"):
        State([{}]).position  # noqa: B018


def test_rows_must_agree():
    with pytest.raises(ValueError, match=r"layer 1's 'z' must have 2 rows like the others, but has shape \[3, 4\]"):
        State([{"S": torch.zeros(2, 1)}, {"z": torch.zeros(3, 4)}])
    with pytest.raises(ValueError, match="rows first"):
        State([{"S": torch.zeros(())}])


def test_select_fork_clone_make_new_states():
    state = make()
    before = state.clone()
    picked = state.select([2, 0, 0])
    assert picked.position.tolist() == [9, 7, 7]
    assert torch.equal(picked.layers[2]["S"], state.layers[2]["S"][[2, 0, 0]])
    assert same(state.select(torch.tensor([0, 1, 2])), state)
    assert state.select([]).rows == 0
    assert same(state.fork(2), state.select([0, 0, 1, 1, 2, 2]))
    copy = state.clone()
    for derived in (copy, picked, state.fork(1)):
        derived.layers[0]["S"].zero_()
    assert same(state, before)


@pytest.mark.parametrize("rows", [[True, False, True], torch.tensor([[0]]), [0.5], torch.tensor(0), 0])
def test_select_wants_integers(rows):
    with pytest.raises(ValueError, match="rows must be integers"):
        make().select(rows)


@pytest.mark.parametrize(("call", "said"), [
    (lambda: make().select("ab"), r"rows must be integers of shape \[n\], but came as 'ab'"),
    (lambda: make().select(None), r"rows must be integers of shape \[n\], but came as None"),
    (lambda: State([{"S": 3}]), "layer 0's 'S' must be a tensor, but came as int"),
    (lambda: make().save("s", model=torch.nn.Linear(1, 1)), "model must be a linattn.LanguageModel or its .* twin, but came as Linear"),
])  # fmt: skip
def test_other_types_are_named(call, said):
    with pytest.raises(TypeError, match=said):
        call()


@pytest.mark.parametrize("row", [3, -1])
def test_select_wants_rows_that_there_are(row):
    with pytest.raises(IndexError, match=rf"rows must be from 0 to 2, but came as \[0, {row}\]"):
        make().select([0, row])


@pytest.mark.parametrize("n", [0, -1, 1.5, True])
def test_fork_wants_a_count(n):
    with pytest.raises(ValueError, match="at least 1"):
        make().fork(n)


def test_to_moves_and_widens():
    state = make().to(torch.float64)
    assert {t.dtype for layer in state.layers for t in layer.values()} == {torch.float64, torch.int64}
    assert all(t.is_meta for layer in make().to("meta", torch.float32).layers for t in layer.values())
    with pytest.raises(ValueError, match="bfloat16"):
        make().to(torch.bfloat16)


def test_saved_and_loaded_is_the_same(tmp_path):
    path = tmp_path / "state.safetensors"
    state = make()
    state.save(path, description={"config": "abc", "tokens": [1, 2]})
    assert same(State.load(path), state)
    assert same(State.load(path, description={"tokens": [1, 2], "config": "abc"}), state)
    assert os.listdir(tmp_path) == ["state.safetensors"]
    empty = State([{}, {"S": torch.zeros(0, 3)}])
    empty.save(path)
    assert same(State.load(path), empty)
    loaded = State.load(path)
    make().save(path)
    assert same(loaded, empty)


def test_saving_a_state_with_a_graph_or_shared_memory(tmp_path):
    shared = torch.ones(2, 3, requires_grad=True)
    State([{"a": shared * 2, "b": shared, "c": shared}]).save(tmp_path / "s")
    assert State.load(tmp_path / "s").layers[0]["a"].tolist() == [[2.0] * 3] * 2


def test_another_description_is_refused(tmp_path):
    path = tmp_path / "s"
    make().save(path, description={"config": "abc"})
    with pytest.raises(ValueError, match=r's belongs to \{"config": "abc"\}, but \{"config": "xyz"\} was wanted'):
        State.load(path, description={"config": "xyz"})


def test_every_truncation_is_refused(tmp_path):
    path = tmp_path / "s"
    make().save(path)
    whole = path.read_bytes()
    for n in [*range(0, len(whole), 97), len(whole) - 1]:
        path.write_bytes(whole[:n])
        with pytest.raises(ValueError, match=f"^{path} is damaged"):
            State.load(path)
    path.write_bytes(whole + b"x")
    with pytest.raises(ValueError, match="is damaged"):
        State.load(path)


def header(**changes) -> dict[str, str]:
    fields = {"format": "linattn.State", "version": 1, "layers": [["a"]], "description": {}}
    return {"linattn": json.dumps(fields | changes)}


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        (None, "holds no state"),
        ({"linattn": "{"}, "holds no state"),
        ({"linattn": "[" * 100_000}, "holds no state"),
        (header(format="other"), "holds no state"),
        (header(version=2), "version 2"),
        (header(layers=None), "without tensor names"),
        (header(layers=[["a", 1]]), "without tensor names"),
        (header(layers=[["a", "b"]]), "tensors that differ"),
        (header(layers=[["a", "a"]]), "tensors that differ"),
        (header(layers=[[], ["a"]]), "tensors that differ"),
    ],
)
def test_foreign_files_are_refused(tmp_path, metadata, said):
    path = tmp_path / "s"
    save_file({"0.a": torch.ones(2)}, path, metadata=metadata)
    with pytest.raises(ValueError, match=f"^{path} .*{said}"):
        State.load(path)


def test_shapes_that_disagree_are_refused(tmp_path):
    path = tmp_path / "s"
    save_file({"0.a": torch.ones(2), "0.b": torch.ones(3, 1)}, path, metadata=header(layers=[["a", "b"]]))
    with pytest.raises(ValueError, match=r"0.b.* must have 2 rows"):
        State.load(path)


def test_pickles_are_refused(tmp_path):
    path = tmp_path / "s"
    torch.save({"0.a": torch.ones(2)}, path)
    with pytest.raises(ValueError, match="not a safetensors file"):
        State.load(path)


def test_missing_files_and_folders(tmp_path):
    with pytest.raises(FileNotFoundError, match="none"):
        State.load(tmp_path / "none")
    with pytest.raises(FileNotFoundError, match="does not exist"):
        make().save(tmp_path / "none" / "s")
    with pytest.raises(IsADirectoryError, match="cannot be written: it is a folder"):
        make().save(tmp_path)
    with pytest.raises(OSError, match=r"Is a directory|denied"):
        State.load(tmp_path)


def test_what_cannot_be_written_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "s"
    make().save(path)
    old = path.read_bytes()
    with pytest.raises(ValueError, match="JSON compliant"):
        make(1).save(path, description={"loss": float("nan")})

    def fails(*_: object) -> None:
        raise OSError("no room")

    for step in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os, step, fails)
            with pytest.raises(OSError, match="no room"):
                make(1).save(path)
    assert path.read_bytes() == old
    assert os.listdir(tmp_path) == ["s"]


def test_a_pytree_and_a_graph_see_the_tensors():
    state = make()
    leaves, spec = pytree.tree_flatten(state)
    assert len(leaves) == 5
    assert same(pytree.tree_unflatten(leaves, spec), state)
    doubled = pytree.tree_map(lambda t: t * 2, state)
    assert torch.equal(doubled.position, state.position * 2)

    def step(state: State) -> State:
        return State([{n: t + 1 for n, t in layer.items()} for layer in state.layers]).fork(2)

    compiled = torch.compile(step, fullgraph=True, backend="eager")
    assert same(compiled(state), step(state))


def test_importing_it_loads_no_safetensors(programs):
    code = "import sys, linattn.state; assert 'safetensors' not in sys.modules and 'transformers' not in sys.modules"
    programs.python("-c", code).check_returncode()


def lm(**changes) -> LanguageModel:
    torch.manual_seed(changes.pop("seed", 0))
    return LanguageModel(LMConfig(**{"vocab_size": 20, "dim": 32, "layers": 2, "mixer": "gla, softmax", **changes}))


def read(model: LanguageModel) -> State:
    with torch.no_grad():
        return model(torch.tensor([[1, 2, 3]]), return_state=True)[1]


def test_a_state_knows_its_model(tmp_path):
    path, model = tmp_path / "s", lm()
    state = read(model)
    state.save(path, model=model)
    assert same(State.load(path, model=model), state)
    assert same(State.load(path, model=lm()), state)  # the same weights
    assert same(State.load(path), state)
    hf = LinattnForCausalLM(HFConfig(vocab_size=20, dim=32, layers=2, mixer="gla, softmax"))
    hf.load_state_dict(model.state_dict())
    assert same(State.load(path, model=hf), state)  # the twin of transformers
    for other, said in [
        (lm(layers=3), "is of another model: layers is 2 there, but 3 here"),
        (lm(mixer="retnet, softmax"), "is of another model: mixer is 'gla, softmax' there, but 'retnet, softmax' here"),
        (lm(mixer_options={"gla": {"heads": 2}}), "is of another model: mixer_options is"),
        (lm().double(), "is of a model in float32, but this one is in float64"),
        (lm().bfloat16(), "is of a model in float32, but this one is in bfloat16"),
        (lm(seed=1), "is of a model with other weights"),
    ]:
        with pytest.raises(ValueError, match=f"^{path} {said}"):
            State.load(path, model=other)
    state.save(path)
    with pytest.raises(ValueError, match=f"^{path} does not name its model"):
        State.load(path, model=model)


def test_weights_are_hashed_again_when_they_have_changed():
    model = lm()
    first = identity(model)
    assert identity(model) == first == identity(lm())
    seen = [first["weights"]]
    with torch.no_grad():
        model.lm_head.weight[0, 0] += 1
    seen.append(identity(model)["weights"])
    weight = model.model.layers[0].mixer.o_proj.weight
    weight.data[0, 0] += 1  # changes no version
    seen.append(identity(model)["weights"])
    weight.data = weight.data.clone().neg_()
    seen.append(identity(model)["weights"])
    assert len(set(seen)) == 4
    with torch.inference_mode():
        still = lm()
        assert identity(still) == first
        still.lm_head.weight.zero_()  # versions do not count such writes
        assert identity(still) != first


@pytest.mark.parametrize("part", [0.0, 0.001, 0.3, 0.9, 0.9999])
def test_a_file_cut_short_is_refused(part, tmp_path):
    path, model = tmp_path / "s", lm()
    read(model).save(path, model=model)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * part)])
    with pytest.raises(ValueError, match=f"^{path} is damaged or not a safetensors file"):
        State.load(path, model=model)


def test_a_process_killed_while_saving_leaves_the_old_file(tmp_path, programs):
    code = """
import os, sys
from linattn.state import State, files
import torch
state = State([{"S": torch.full((1, 64), float(sys.argv[2]))}])
if sys.argv[2] == "2":
    files.sync = lambda path: os._exit(9)  # the new file is written, but not in its place
state.save(sys.argv[1])
"""
    path = tmp_path / "s"
    for value, exit_code in (("1", 0), ("2", 9)):
        assert programs.python("-c", code, path, value).returncode == exit_code
    assert State.load(path).layers[0]["S"].unique().tolist() == [1.0]


def test_states_are_put_together():
    one, two = make(1), make(2)
    both = State.cat([one, two])
    assert both.rows == 3
    assert same(both.select([0]), one)
    with pytest.raises(ValueError, match="states must hold at least one state"):
        State.cat([])
    assert same(both.select([1, 2]), two)
    wide = State([{**layer, "S": layer["S"].double()} if layer else {} for layer in two.layers])
    for other in (wide, State([{}, {}, {}]), State([{"S": torch.zeros(1, 2)}])):
        with pytest.raises(ValueError, match="equal names, dtypes and sizes"):
            State.cat([one, other])


def test_a_state_takes_no_device_s_place(tmp_path):
    pipe = tmp_path / "pipe"  # as /dev/null is, for root
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="pipe cannot be written: it is a device or a pipe"):
        make().save(pipe)
    assert pipe.is_fifo() and [p.name for p in tmp_path.iterdir()] == ["pipe"]
