"""State files named by requests: names, damage, other models, and rows that are added, removed and moved."""

import json
import os

import pytest
import torch

from linattn.hf import LinattnForCausalLM, LMConfig
from linattn.state import State
from linattn.state.identity import identity
from linattn.vllm import states
from linattn.vllm.layout import Layout


def model(seed: int = 0, **options) -> LinattnForCausalLM:
    torch.manual_seed(seed)
    return LinattnForCausalLM(LMConfig(vocab_size=40, dim=32, layers=2, **{"mixer": "gated_deltanet", **options})).eval()


@pytest.fixture
def served(tmp_path, monkeypatch):
    folder = tmp_path / "states"
    folder.mkdir()
    monkeypatch.setenv(states.VARIABLE, str(folder))
    lm = model()
    states.begin(lm)
    return lm, folder


@torch.no_grad()
def state_of(lm, tokens: int = 5, rows: int = 1) -> State:
    return lm.model(torch.arange(tokens)[None].repeat(rows, 1), return_state=True)[1]


def save(folder, name: str, state: State, of) -> None:
    state.save(folder / f"{name}.safetensors", model=of)


def test_a_file_of_the_model_is_read(served):
    lm, folder = served
    state = state_of(lm)
    save(folder, "chat-1", state, lm)
    states.check({states.LOAD: "chat-1"})
    again = states.read("chat-1")
    assert all(torch.equal(a[k], b[k]) for a, b in zip(state.layers, again.layers, strict=True) for k in a)
    assert json.loads((folder / ".model.json").read_text()) == identity(lm)


@pytest.mark.parametrize("name", ["../other", "a/b", "", ".model", "x" * 129, "a.b", "\0", 3, None, "é", "a\n"])
def test_names_lead_nowhere_else(served, name):
    for key in (states.LOAD, states.SAVE):
        with pytest.raises(ValueError, match="a state's name must be"):
            states.check({key: name})


def test_links_are_not_followed(served, tmp_path):
    lm, folder = served
    state_of(lm).save(tmp_path / "away.safetensors", model=lm)
    os.symlink(tmp_path / "away.safetensors", folder / "link.safetensors")
    (folder / "folder.safetensors").mkdir()
    for name in ("link", "folder"):
        for key in (states.LOAD, states.SAVE):
            with pytest.raises(ValueError, match="is not a regular file"):
                states.check({key: name})


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("weights", "other weights"),
        ("options", "another model: "),
        ("dtype", "in bfloat16"),
        ("nobody", "does not name its model"),
        ("rows", "holds 2"),
    ],
)
def test_files_of_others_are_refused(served, change, told):
    lm, folder = served
    other = {"weights": lambda: model(1), "options": lambda: model(mixer="gla"), "dtype": lambda: model().bfloat16()}.get(
        change, lambda: lm
    )()
    save(folder, "one", state_of(lm, rows=2 if change == "rows" else 1), None if change == "nobody" else other)
    with pytest.raises(ValueError, match=told) as caught:
        states.check({states.LOAD: "one"})
    assert str(folder) not in str(caught.value)


def test_a_flipped_bit_and_a_missing_file_are_found(served):
    lm, folder = served
    save(folder, "one", state_of(lm), lm)
    content = bytearray((folder / "one.safetensors").read_bytes())
    content[-9] ^= 4
    (folder / "one.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match="damaged"):
        states.check({states.LOAD: "one"})
    with pytest.raises(ValueError, match="there is no state 'two'"):
        states.check({states.LOAD: "two"})


def test_without_a_folder_and_with_unknown_keys_requests_are_refused(monkeypatch, tmp_path, served):
    with pytest.raises(ValueError, match="there is no 'linattn_stat'"):
        states.check({"linattn_stat": "one"})
    with pytest.raises(ValueError, match="2 samples"):
        states.check({states.SAVE: "one"}, 2)
    states.check({"other": 1}), states.check(None)
    monkeypatch.delenv(states.VARIABLE)
    with pytest.raises(ValueError, match="keeps no state files"):
        states.check({states.SAVE: "one"})
    monkeypatch.setenv(states.VARIABLE, str(tmp_path / "none"))
    with pytest.raises(ValueError, match="must name a folder"):
        states.check({states.SAVE: "one"})


def test_rows_write_when_they_go_wherever_they_moved(served):
    lm, folder = served
    one, two = state_of(lm, 3), state_of(lm, 7)
    layouts = [Layout(layer) for layer in one.layers]
    pages = [torch.zeros(4, layout.nbytes, dtype=torch.uint8) for layout in layouts]
    rows = states.Rows()
    for row, name in ((0, "one"), (1, None), (2, "two")):
        extra = {} if name is None else {states.SAVE: name}
        states.check(extra)
        rows.add(row, extra)
    rows.remove(1)
    rows.move(2, 1, swap=False)
    rows.move(0, 1, swap=True)  # two is in row 0, one in row 1
    assert (folder / ".two.pending").exists()
    for i, (layout, page) in enumerate(zip(layouts, pages, strict=True)):
        layout.write(page, torch.tensor([3]), two.layers[i])
        layout.write(page, torch.tensor([1]), one.layers[i])
        rows.keep(i, layout, page, torch.tensor([3, 1]))
        page.zero_()  # the pages belong to others by then
    rows.remove(0), rows.remove(1)
    for name, state in (("one", one), ("two", two)):
        again = states.read(name)
        assert all(torch.equal(a[k], b[k]) for a, b in zip(state.layers, again.layers, strict=True) for k in a)
        assert not (folder / f".{name}.pending").exists()


def test_a_file_that_is_being_written_may_be_named_and_a_lost_one_ends_the_sequence(served, caplog):
    lm, folder = served
    states.check({states.SAVE: "next"})
    states.check({states.LOAD: "next"})
    rows = states.Rows()
    rows.add(4, {states.LOAD: "next", states.SAVE: "after"})
    assert rows.failed == [4] and "there is no state 'next'" in caplog.text and rows.given(0) == {}
    save(folder, "next", state_of(lm), lm)
    rows.add(4, {states.LOAD: "next"})
    assert rows.failed == [] and torch.equal(rows.given(1)[4]["S"], state_of(lm).layers[1]["S"])
    assert not (folder / "after.safetensors").exists()
    states.begin(lm)  # a new server expects no files of an earlier one
    assert not list(folder.glob("*.pending"))
