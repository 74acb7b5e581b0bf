"""``linattn.explain`` and ``linattn.debug``."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch

import linattn
from tests.ops.cases import FORMS, make


def text(capsys, call=None, **how: str) -> str:
    call = call or make("plain", "BTH", T=20)
    said = linattn.explain(**call.arguments(), **how)
    assert capsys.readouterr().out == said + "\n"
    return said


def line(said: str, backend: str) -> str:
    (found,) = (x for x in said.splitlines() if x.strip().startswith(f"{backend}:"))
    return found


def test_it_says_what_runs_and_why_each_other_does_not(capsys):
    said = text(capsys)
    assert "float64" in said and "cpu" in said and "[2, 20, 2, 4]" in said
    assert "runs" in line(said, "torch") and "chunk" in line(said, "torch")
    for other in ("triton", "cpu", "reference"):
        assert ": no, " in line(said, other) and len(line(said, other).split(": no, ")[1].split()) >= 3


def test_a_step_is_recurrent(capsys):
    assert "recurrent form" in line(text(capsys, make("plain", "BTH", T=1)), "torch")


@pytest.mark.parametrize("form", FORMS)
def test_the_form_that_was_asked_for(capsys, form):
    assert f"{form} form" in line(text(capsys, form=form), "torch")


def test_the_backend_that_was_asked_for(capsys):
    said = text(capsys, backend="reference")
    assert "runs" in line(said, "reference") and "no, " in line(said, "torch")


def test_it_refuses_what_the_op_refuses():
    call = make("plain", "BTH")
    with pytest.raises(ValueError, match="decay"):
        linattn.explain(**call.with_(decay=torch.ones(7)).arguments())
    with pytest.raises(ValueError, match="no form"):
        linattn.explain(**call.arguments(), backend="reference", form="chunk")
    with pytest.raises(ValueError, match="backend"):
        linattn.explain(**call.arguments(), backend="nonsense")
    with pytest.raises(TypeError):
        linattn.explain(**call.arguments(), gk=None)


@pytest.mark.parametrize(
    ("bias", "z", "refused"),
    [(2.0, None, None), (0.5, None, "dt is a time step"), ([1.0], None, "bias must have shape"), (None, [1.0], "z must have shape")],
)
def test_of_a_selective_scan_it_takes_what_the_scan_takes(bias, z, refused):
    """It accepts a bias that makes time steps positive, and checks arguments."""
    x, a, b = torch.full((1, 4, 3), -1.0 if z is None else 1.0), -torch.ones(3, 2), torch.ones(1, 4, 2)
    given = {"bias": torch.full((3,), bias) if isinstance(bias, float) else bias and torch.tensor(bias), "z": z and torch.tensor(z)}
    for run in (linattn.selective_scan, partial(linattn.explain, linattn.selective_scan)):
        with nullcontext() if refused is None else pytest.raises(ValueError, match=refused):
            run(x, x, a, b, b, **given)


def test_what_it_says_is_what_runs(capsys):
    """Exactly one backend runs."""
    for backend in ("auto", "torch", "reference"):
        assert text(capsys, backend=backend).count(": runs") == 1


def test_debug_is_a_context_and_changes_nothing_on_a_cpu():
    call = make("plain", "BTH")
    with linattn.debug() as given:
        inside = call()
    assert given is None and torch.equal(inside["o"], call()["o"])
    with linattn.debug(), linattn.debug(), pytest.raises(ValueError, match="decay"):
        call.with_(decay=-call.tensors["decay"])()


def test_debug_ends_with_its_block_even_after_an_error():
    from linattn.ops import checks

    with pytest.raises(RuntimeError, match="mine"), linattn.debug():
        assert checks._debugging.get()
        raise RuntimeError("mine")
    assert not checks._debugging.get()


def test_values_on_a_meta_tensor_are_not_looked_at():
    """Only shapes are checked."""
    call = make("plain", "BTHK", T=70)
    meta = call.with_(**{n: t.to("meta") for n, t in call.tensors.items()})
    out = meta("chunk", "auto")
    assert out["o"].shape == (2, 70, 2, 3) and out["o"].device.type == "meta" and out["S"].shape == (2, 2, 4, 3)


def other_operations():
    """Operations that explain takes as first argument, with a call of each."""
    from linattn.ops import convolution_step, gated, linears, norms, recurrent_step, selective_step, short_convolution

    x, token, state = torch.ones(1, 5, 8), torch.ones(1, 1, 2, 4), torch.ones(1, 2, 4, 4)
    a, b = -torch.ones(8, 3), torch.ones(1, 3)
    return {
        "linear_attention": (linattn.linear_attention, (token, token, token), {"form": "chunk"}),
        "rms_norm": (norms.rms_norm, (x, torch.ones(8)), {"eps": 1e-6}),
        "unit_length": (norms.unit_length, (x,), {"eps": 1e-6, "dtype": torch.float32}),
        "gated": (gated.gated, (x, x), {}),
        "short_convolution": (short_convolution.short_convolution, (x, torch.ones(8, 1, 4)), {}),
        "linears": (linears.linears, (x[:, 0], [torch.ones(3, 8)], [None]), {}),
        "step_": (convolution_step.step_, (x[:, :1], torch.ones(1, 3, 8), torch.ones(8, 1, 4), None, True), {}),
        "selective_step_": (selective_step.selective_step_, (torch.ones(1, 8, 3), x[:, 0], x[:, 0], a, b, b), {}),
        "recurrent_step_": (recurrent_step.recurrent_step_, (state, token, token, token), {}),
    }


@pytest.mark.parametrize("name", other_operations())
def test_every_operation_that_chooses_is_explained(name, capsys):
    op, arguments, options = other_operations()[name]
    said = linattn.explain(op, *arguments, **options)
    assert said.startswith(f"{name} on cpu, torch.float32") and capsys.readouterr().out == said + "\n"
    assert said.count(": runs") == 1 and "triton: no, it" in said
    with pytest.raises(TypeError):
        linattn.explain(op, *arguments, gk=None, **options)


@pytest.mark.parametrize("name", ["gated", "linears", "step_"])
def test_what_takes_no_backend_is_asked_for_none(name):
    op, arguments, options = other_operations()[name]
    with pytest.raises(ValueError, match="but came as 'cpu'"):
        linattn.explain(op, *arguments, backend="cpu", **options)
