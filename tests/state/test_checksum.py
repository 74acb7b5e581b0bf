"""A flipped bit anywhere in a file is detected; files without a checksum are read."""

import json
import random

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from linattn.models.files import read_weights, save
from linattn.state import State


def make() -> State:
    return State([{"a": torch.randn(2, 3), "position": torch.tensor([4, 5])}, {}])


def flip(path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def test_a_flipped_bit_in_a_state(tmp_path):
    """In the header, the payload, the digits of the checksum, its name and the padding; a prime stride covers all bit positions."""
    path = tmp_path / "s"
    make().save(path, description={"of": "a test"})
    whole = path.read_bytes()
    for bit in range(0, 8 * len(whole), 7):
        flip(path, bit)
        with pytest.raises(ValueError, match=f"^{path} "):
            State.load(path)
        path.write_bytes(whole)
    State.load(path)


def test_states_of_earlier_versions(tmp_path):
    state, path = make(), tmp_path / "s"
    state.save(path)
    with safe_open(path, framework="pt") as file:
        told = file.metadata()
    assert told.pop("checksum").startswith("sha256:")
    save_file(load_file(path), path, metadata=told)
    assert torch.equal(State.load(path).layers[0]["a"], state.layers[0]["a"])


def test_the_same_state_gives_the_same_file(tmp_path):
    state = make()
    for name in ("one", "other"):
        state.save(tmp_path / name)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "other").read_bytes()


def test_weights(tmp_path):
    model, path = torch.nn.Linear(5, 3), tmp_path / "model.safetensors"
    save(tmp_path, model, {"model_type": "test"})
    whole, dice = path.read_bytes(), random.Random(0)
    assert json.loads(whole[8 : 8 + int.from_bytes(whole[:8], "little")])["__metadata__"]["format"] == "pt"
    for bit in [*range(0, 8 * len(whole), 53), *(dice.randrange(8 * len(whole)) for _ in range(20))]:
        flip(path, bit)
        with pytest.raises(ValueError, match=f"^{path} (is damaged|does not fit)"):
            read_weights(path, lambda: torch.nn.Linear(5, 3))
        path.write_bytes(whole)
    assert torch.equal(read_weights(path, lambda: torch.nn.Linear(5, 3)).weight, model.weight)
    save_file(model.state_dict(), path)  # as others write them
    assert torch.equal(read_weights(path, lambda: torch.nn.Linear(5, 3)).weight, model.weight)
