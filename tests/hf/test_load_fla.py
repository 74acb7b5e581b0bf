"""Checkpoints of flash-linear-attention are read with the same logits and exported again. Its classes run in other processes."""

import json

import pytest
import torch
from safetensors.torch import load_file

import linattn
from linattn.hf.convert import family
from linattn.hf.load import config_of, export, load
from tests.hf.fla_models import DEFAULT, MODELS

# Weights that are rounded: 1 − μ; a softmax over layers, up to a constant.
ROUNDED = ("ffn.key.mu", "ffn.receptance.mu", "ffn.x_k", "model.lower_bounds")


@pytest.fixture(scope="module")
def theirs(tmp_path_factory, programs):
    """Their models as saved by them."""
    return run(programs, tmp_path_factory.mktemp("theirs"))


@pytest.fixture(scope="module")
def back(theirs, tmp_path_factory, programs):
    """The same, read, exported, and read by them."""
    out = tmp_path_factory.mktemp("back")
    for name in MODELS:
        export(load(theirs / name), name, out / name)
    run(programs, theirs, out)
    return out


def run(programs, *folders):
    done = programs.python("-m", "tests.hf.fla_models", *folders)
    if done.returncode and "LINATTN_OFFLINE=1" in done.stdout + done.stderr:
        pytest.skip("the wheels of flash-linear-attention are not there, and LINATTN_OFFLINE=1")
    assert done.returncode == 0, done.stderr
    return folders[0]


def distance(got, wanted):
    return ((got - wanted).norm() / wanted.norm()).item()


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_generation(name, theirs):
    ours, kept = load(theirs / name), load_file(theirs / f"{name}.safetensors")
    with torch.no_grad():
        assert distance(ours(kept["ids"]).logits, kept["logits"]) < 1e-5
    assert torch.equal(ours.generate(kept["ids"][:1], max_new_tokens=8, do_sample=False, eos_token_id=None), kept["greedy"])


@pytest.mark.parametrize("name", MODELS)
def test_the_way_back(name, theirs, back):
    before, after = (load_file(folder / name / "model.safetensors") for folder in (theirs, back))
    assert before.keys() == after.keys()
    for key, weight in after.items():
        if key == "model.lower_bounds":
            before[key] = before[key].log_softmax(0)
        if key.endswith(ROUNDED):
            torch.testing.assert_close(weight, before[key], rtol=1e-5, atol=1e-6)
        else:
            assert torch.equal(weight, before[key]), key
    logits, wanted = (load_file(folder / f"{name}.safetensors")["logits"] for folder in (back, theirs))
    assert distance(logits, wanted) < 1e-5


@pytest.mark.parametrize("name", MODELS)
def test_names_and_shapes_of_their_defaults(name, theirs):
    """From nearly empty configs, with their defaults."""
    with torch.device("meta"):
        ours = linattn.LanguageModel(config_of({"model_type": name, **DEFAULT[name]}))
    wanted, own = json.loads((theirs / f"{name}.json").read_text()), ours.state_dict()
    got = {}
    for line in family(name).lines(ours.config):
        got |= zip(line.theirs, (list(t.shape) for t in line.write([own[n] for n in line.ours])), strict=True)
    assert got == wanted
