"""Which layers stay softmax: the ranking against explicit choices."""

import json
import math

import pytest
import torch
import torch.nn.functional as F

from linattn.distill.conversion import convert
from linattn.distill.keep import rank_layers, restored
from linattn.distill.student import replaced, student_layers, student_of
from linattn.hf.load import load
from tests.convert.models import SMALL, softmax_model

IDS = torch.randint(0, 256, (4, 24), generator=torch.Generator().manual_seed(2))


def kl(model, teacher) -> float:
    with torch.no_grad():
        p, q = (F.softmax(m(IDS).logits.double(), -1) for m in (teacher, model))
    return (p * (p / q).log()).sum(-1).mean().item()


def test_the_ranking_is_that_of_every_single_choice():
    teacher = softmax_model()
    layers, full = (student_layers(teacher, mixer, mixer_options={}) for mixer in ("gla", "softmax"))
    student, softmax = student_of(teacher, layers), student_of(teacher, full)
    before = {name: t.clone() for name, t in student.state_dict().items()}
    ranking = rank_layers(student, softmax, lambda: kl(student, teacher))
    by_hand = {}
    for i in range(3):
        one = student_of(teacher, student_layers(teacher, "gla", kept=(i,), mixer_options={}))
        own = {name: t for name, t in before.items() if not name.startswith(f"model.layers.{i}.mixer.")}
        assert not one.load_state_dict(own, strict=False).unexpected_keys
        by_hand[i] = kl(one, teacher)
    assert ranking == pytest.approx(by_hand, rel=1e-6)
    assert list(ranking) == sorted(by_hand, key=by_hand.get)
    assert len(set(ranking.values())) == 3
    assert replaced(student) == [0, 1, 2]
    assert all(torch.equal(t, before[name]) for name, t in student.state_dict().items())
    mixed, named = restored(student, softmax, layers, full, [1])
    assert [name for name, _ in named] == ["gla", "softmax", "gla"]
    assert kl(mixed, teacher) == pytest.approx(by_hand[1], rel=1e-6)


def test_equal_layers_are_ranked_by_number():
    teacher = softmax_model()
    student = student_of(teacher, student_layers(teacher, "gla", mixer_options={}))
    assert list(rank_layers(student, teacher, lambda: 1.0)) == [0, 1, 2]


def test_layers_are_chosen_after_the_first_stage(teacher, text, tmp_path):
    result = convert(teacher, mixer="gla", keep=2, text=[str(text)], out=tmp_path / "out", progress=False, **SMALL)
    ranking = json.loads((tmp_path / "out" / "ranking.json").read_text())
    values = {int(i): value for i, value in ranking["kl"].items()}
    assert list(values) == sorted(values, key=values.get)
    assert result.kept == tuple(sorted(list(values)[:2])) == tuple(ranking["kept"])
    assert [record["kept"] for record in result.history if record["stage"] in ("copy", 1)] == [[]] * 3
    model, original = load(result.folder), load(teacher)
    assert replaced(model) == [i for i in range(3) if i not in result.kept]
    assert all(math.isfinite(record["kl"]) for record in result.history)
    assert original.config.mixer == "softmax"


def test_layers_are_chosen_without_a_second_stage(teacher, text, tmp_path):
    options = {**SMALL, "tokens1": 0, "tokens2": 0}
    result = convert(teacher, mixer="gla", keep=1, text=[str(text)], out=tmp_path / "out", progress=False, **options)
    assert [record["stage"] for record in result.history] == ["copy", "keep"]
    ranking = json.loads((tmp_path / "out" / "ranking.json").read_text())
    assert result.history[-1]["kl"] == pytest.approx(ranking["kl"][str(result.kept[0])], rel=1e-5)
