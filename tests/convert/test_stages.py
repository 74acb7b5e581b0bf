"""Losses of the stages against naive formulas, and trained parameters."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from linattn.distill import losses
from linattn.distill.calibrate import Fit, calibrate
from linattn.distill.options import ConvertOptions
from linattn.distill.processes import device_of
from linattn.distill.stages import loss_of, stages_of, trained
from linattn.distill.step import gradients
from linattn.distill.student import replaced, student_layers, student_of
from linattn.distill.teacher import teacher_pass
from tests.convert.models import softmax_model

IDS = torch.randint(0, 256, (3, 20), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def pair():
    """Teacher and student in float64, whose heads differ."""
    teacher = softmax_model().double()
    student = student_of(teacher, student_layers(teacher, "gla, softmax", mixer_options={}))
    torch.nn.init.normal_(student.lm_head.weight, std=0.1)
    return teacher, student


@pytest.mark.parametrize("fields", [{}, {"block": "post"}])
def test_the_teacher_is_recorded_layer_by_layer(fields):
    """Against transformers' hidden states, and direct calls of the mixers."""
    teacher = softmax_model(**fields)
    seen = teacher_pass(teacher, IDS)
    with torch.no_grad():
        between = teacher(IDS, output_hidden_states=True).hidden_states
        for i, layer in enumerate(teacher.model.layers):
            x = between[i] if fields else layer.mixer_norm(between[i])
            torch.testing.assert_close(seen.inputs[i], x)
            torch.testing.assert_close(seen.outputs[i], layer.mixer(x))
    torch.testing.assert_close(seen.hidden, between[-1])
    assert not any(layer.mixer._forward_hooks for layer in teacher.model.layers)


def test_output_errors(pair):
    teacher, student = pair
    seen = teacher_pass(teacher, IDS)
    wanted = []
    for i in (0, 2):
        difference = student.model.layers[i].mixer(seen.inputs[i]) - seen.outputs[i]
        wanted.append((difference**2).sum() / (seen.outputs[i] ** 2).sum())
    torch.testing.assert_close(losses.output_errors(student, seen), torch.stack(wanted), rtol=1e-12, atol=0)


def test_values_are_handed_on_from_layer_to_layer():
    teacher = softmax_model()
    layers = student_layers(teacher, "rwkv7", mixer_options={"rwkv7": {"value_residual": False}})
    layers[1][1]["value_residual"] = True
    student = student_of(teacher, layers)
    seen = teacher_pass(teacher, IDS)
    before = losses.output_errors(student, seen)
    student.model.layers[0].mixer.v_proj.weight.data.mul_(2)
    assert losses.output_errors(student, seen)[1] != before[1]


@pytest.mark.parametrize("piece", [1 << 24, 700])
def test_distances_and_cross_entropy(pair, piece, monkeypatch):
    """Values and gradients of whole logits and of pieces."""
    monkeypatch.setattr(losses, "PIECE", piece)
    teacher, student = pair
    target = teacher_pass(teacher, IDS).hidden
    p = F.softmax(teacher.lm_head(target), -1)
    with torch.no_grad():
        logits = student(IDS).logits
        assert losses.agreement(student, teacher, student.model(IDS)[0], target) == (logits.argmax(-1) == p.argmax(-1)).sum()
    weights = [student.lm_head.weight, student.model.layers[0].mixer.q_proj.weight]
    teacher.requires_grad_(True)
    for name in ("distances", "cross_entropy"):
        log_q, hidden = F.log_softmax(student(IDS).logits, -1), student.model(IDS)[0]
        if name == "distances":
            got = losses.distances(student, teacher, hidden, target)
            wanted = (p.detach() * (p.detach().log() - log_q)).sum()
        else:
            got = losses.cross_entropy(student, hidden, IDS)
            wanted = -log_q[:, :-1].gather(-1, IDS[:, 1:, None]).sum()
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=0)
        grads = torch.autograd.grad(got, weights, retain_graph=True)
        torch.testing.assert_close(grads, torch.autograd.grad(wanted, weights), rtol=1e-9, atol=1e-12)
        got.backward()
        assert all(parameter.grad is None for parameter in teacher.parameters())


def test_what_each_stage_trains(pair):
    teacher, student = pair
    first, second, third = stages_of(ConvertOptions(tokens3=1), 32)
    assert len(trained(student, first)) == sum(1 for i in (0, 2) for _ in student.model.layers[i].mixer.parameters())
    loss_of(first, student, teacher, IDS).backward()
    touched = {name for name, p in student.named_parameters() if p.grad is not None}
    assert touched
    assert all(name.startswith(("model.layers.0.mixer.", "model.layers.2.mixer.")) for name in touched)
    for stage in (second, third):
        assert len(trained(student, stage)) == len(list(student.parameters()))
        loss_of(stage, student, teacher, IDS).backward()
    assert all(p.grad is not None for p in student.parameters())


def test_parts_of_a_batch_have_the_gradients_of_the_whole(pair):
    teacher, student = pair
    stage = stages_of(ConvertOptions(), 32)[1]
    parameters, found = trained(student, stage), []
    for parts in (1, 2):
        student.zero_grad()
        job = SimpleNamespace(options=SimpleNamespace(accumulate=parts), precision=nullcontext, student=student, teacher=teacher)
        found.append((gradients(job, stage, IDS).double(), [p.grad.clone() for p in parameters]))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-6, atol=0)
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-9, atol=1e-12)


def test_steps_and_learning_rates():
    options = ConvertOptions(tokens1=1000, tokens2=0, tokens3=8192, context=16, batch_size=4, rate1=1e-2)
    first, second, third = stages_of(options, 1024)
    assert (first.steps, first.tokens, second.steps) == (16, 1024, 0)
    assert (third.context, third.rows, third.steps) == (64, 1, 128)
    assert first.rate_at(0) == pytest.approx(1e-2 / 2)  # of 16 steps one rises
    assert first.rate_at(16) == pytest.approx(1e-4)
    assert first.rate_at(8) == pytest.approx((1e-2 + 1e-4) / 2)
    long = stages_of(ConvertOptions(tokens2=512 * 16 * 1000), 576)[1]
    assert [long.rate_at(step) for step in (0, 9, 1000)] == pytest.approx([6e-4 / 21, 6e-4 * 10 / 21, 6e-5], rel=1e-3)
    assert third.rate_at(127) == pytest.approx(6e-5 * 576 / 1024)
    assert [stages_of(ConvertOptions(), width)[0].rate for width in (4096, 1024, 64)] == pytest.approx([1e-3, 2e-3, 8e-3])
    assert stages_of(ConvertOptions(rate2=0.5), 1024)[1].rate == 0.5


def test_a_fit_is_that_of_least_squares():
    x, y = torch.randn(500, 7, dtype=torch.float64), torch.randn(500, 3, dtype=torch.float64)
    fit = Fit(ridge=0.0)
    fit.add(x[:200].view(2, 100, 7), y[:200].view(2, 100, 3))
    fit.add(x[200:], y[200:])
    torch.testing.assert_close(fit.weight().T, torch.linalg.lstsq(x, y).solution)
    ridged = Fit(ridge=0.1)
    ridged.add(x, y)
    root = (0.1 * (x**2).sum(0).mean()).sqrt() * torch.eye(7, dtype=torch.float64)
    wanted = torch.linalg.lstsq(torch.cat([x, root]), torch.cat([y, torch.zeros(7, 3, dtype=torch.float64)])).solution
    torch.testing.assert_close(ridged.weight().T, wanted)


@pytest.mark.parametrize("mixer", ["gla", "gated_deltanet, softmax", "kda", "mamba2", "rwkv7", "cosformer"])
def test_calibration_lowers_every_output_error(mixer):
    teacher = softmax_model()
    student = student_of(teacher, student_layers(teacher, mixer, mixer_options={}), context=64)
    batches = [teacher_pass(teacher, torch.randint(0, 256, (8, 32))) for _ in range(4)]
    with torch.no_grad():
        before = torch.stack([losses.output_errors(student, seen) for seen in batches]).mean(0)
        calibrate(student, batches)
        after = torch.stack([losses.output_errors(student, seen) for seen in batches]).mean(0)
    assert len(before) == len(replaced(student))
    assert (after < before).all()
    assert (after < 1).all()  # better than zeros


def test_without_a_gpu_a_torch_built_for_cuda_trains_on_the_cpu(monkeypatch):
    """Such a torch names CUDA as its accelerator even without a GPU."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_: torch.device("cuda"))
    for there, wanted in ((False, "cpu"), (True, "cuda")):
        monkeypatch.setattr(torch.accelerator, "is_available", lambda there=there: there)
        assert device_of(None) == torch.device(wanted)
    assert device_of("cpu") == torch.device("cpu")
