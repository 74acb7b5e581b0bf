"""Students that start from another conversion's weights: one first stage for several choices of softmax layers."""

import pytest
import torch

import linattn
from linattn.distill.conversion import convert
from linattn.distill.job import continued
from linattn.distill.student import student_layers, student_of
from tests.convert.models import SMALL, softmax_model


@pytest.fixture(scope="module")
def first(teacher, text, tmp_path_factory):
    """A first stage of GLA in every layer."""
    out = tmp_path_factory.mktemp("start") / "first"
    return convert(teacher, mixer="gla", text=[str(text)], out=out, progress=False, **{**SMALL, "tokens2": 0}).folder


def test_mixers_are_those_of_the_start_and_softmax_the_teachers(first, teacher, text, tmp_path):
    options = {**SMALL, "tokens1": 0, "tokens2": 0, "text": [str(text)], "progress": False}
    result = convert(teacher, mixer="gla, softmax", start=first, out=tmp_path / "out", **options)
    assert [record["stage"] for record in result.history] == ["start"]
    student, there, original = (linattn.load(path).state_dict() for path in (result.folder, first, teacher))
    for name, weight in student.items():
        assert torch.equal(weight, (original if name.startswith("model.layers.1.mixer.") else there)[name]), name
    assert not torch.equal(there["model.layers.0.mixer.o_proj.weight"], original["model.layers.0.mixer.o_proj.weight"])


def test_a_start_goes_on_with_either_stage_and_is_part_of_the_conversion(first, teacher, text, tmp_path):
    options = {**SMALL, "tokens1": 64, "tokens2": 64, "text": [str(text)], "progress": False, "mixer": "gla", "keep": 1}
    result = convert(teacher, start=first, out=tmp_path / "out", **options)
    assert [record["stage"] for record in result.history] == ["start", 1, 2]  # not calibrated again
    assert len(result.kept) == 1
    with pytest.raises(ValueError, match="holds a conversion with other options: start differ"):
        convert(teacher, out=tmp_path / "out", resume=True, **options)
    assert convert(teacher, start=first, out=tmp_path / "out", resume=True, **options).history == result.history


@pytest.mark.parametrize("mixer", ["rwkv7", "kda", "mamba2", "gated_deltanet", "hgrn2"])
def test_layers_of_a_hybrid_start_from_those_of_a_pure_student(mixer):
    """RWKV-7's initial weights depend on the index of a layer among its kind, which differs in a hybrid."""
    teacher = softmax_model(layers=4)
    pure, hybrid = (student_layers(teacher, pattern, mixer_options={}) for pattern in (mixer, f"softmax, {mixer}"))
    start, student = student_of(teacher, pure), student_of(teacher, hybrid)
    for p in start.parameters():
        torch.nn.init.normal_(p)
    continued(student, start, hybrid)
    there = start.state_dict()
    for name, weight in student.state_dict().items():
        assert name.startswith(("model.layers.0.mixer.", "model.layers.2.mixer.")) or torch.equal(weight, there[name]), name


def test_starts_that_do_not_fit_are_refused(first):
    teacher = softmax_model()
    for mixer, options, message in (
        ("retnet", {}, "start must have retnet with the same options in layer 0, but has gla"),
        ("gla", {"gla": {"key_ratio": 0.5}}, "start must have gla with the same options in layer 0, but has gla"),
    ):
        layers = student_layers(teacher, mixer, mixer_options=options)
        with pytest.raises(ValueError, match=message):
            continued(student_of(teacher, layers), linattn.load(first), layers)
    layers = student_layers(teacher, "gla", mixer_options={})
    wide = student_of(softmax_model(vocab_size=300), layers)
    with pytest.raises(ValueError, match="start must have the student's weights, but lm_head.weight differs"):
        continued(wide, linattn.load(first), layers)
    larger = softmax_model(layers=4)
    layers = student_layers(larger, "gla", mixer_options={})
    with pytest.raises(ValueError, match="start must have the teacher's 4 layers of width 32, but has 3 layers of width 32"):
        continued(student_of(larger, layers), linattn.load(first), layers)
