"""Rounding of matrices, against its definition."""

import itertools

import pytest
import torch

from linattn.models.quantised import Format
from linattn.ops.torch.quantised import dequantised
from linattn.quantization.rounding import DAMPING, compensated, rounded

FORMATS = [Format("int8"), *(Format("int4", g) for g in (32, 64, 128))]


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_rounding_is_to_nearest(form):
    w = torch.randn(7, 256)
    w[3] = 0
    q = rounded(w, form)
    floats = dequantised(*q, torch.float64)
    scale = q.scale.double().abs().repeat_interleave(256 // (q.scale.shape[1] if q.scale.ndim == 2 else 1), -1).view(7, -1).expand(7, 256)
    error = (floats - w).abs()
    if form.group is None:
        assert bool((error <= scale * 0.5001).all())
    else:  # clipped numbers beside, where that lowers the sum of squares
        assert (error > scale * 0.501).double().mean() < 0.05
        groups = w.unflatten(1, (-1, form.group))
        plain = (groups.gather(-1, groups.abs().argmax(-1, keepdim=True)) / -8).half().float()
        before = ((groups / plain).round().clamp(-8, 7) * plain).nan_to_num().flatten(1)
        assert error.square().sum() <= (before - w).square().sum()
    assert bool((floats[3] == 0).all())


def test_what_is_quantised_already_is_rounded_to_itself():
    w = dequantised(*rounded(torch.randn(40, 128), Format("int4", 32)), torch.float32)
    assert torch.equal(dequantised(*rounded(w, Format("int4", 32)), torch.float32), w)


def loss(w, floats, h):
    d = (floats - w).double()
    return ((d @ h) * d).sum()


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_compensation_lowers_the_error_of_the_output(form):
    mix = torch.randn(256, 256) / 16 + torch.eye(256)
    x, w = torch.randn(2000, 256) @ mix @ mix, torch.randn(32, 256)
    h = (x.T @ x).double()
    plain, better = (loss(w, dequantised(*q, torch.float64), h) for q in (rounded(w, form), compensated(w, form, h)))
    assert better < 0.8 * plain


def test_compensation_of_two_columns_is_the_least_error():
    """Given the first code, the last column's is the nearest to its optimum, with the smallest error of all codes."""
    h = torch.tensor([[2.0, 0.9], [0.9, 1.0]]).double()
    full = torch.eye(32).double() * 1e-6
    full[:2, :2] = h
    w = torch.zeros(50, 32)
    w[:, :2] = torch.randn(50, 2)
    w[:, 2] = 4.0  # sets the scale
    q = compensated(w, Format("int4", 32), full)
    full.diagonal().mul_(1 + DAMPING)
    floats, scale = dequantised(*q, torch.float64), q.scale.double()
    for row in range(50):
        errors = []
        for code in range(-8, 8):
            other = floats[row].clone()
            other[1] = code * scale[row, 0]
            d = other[:2] - w[row, :2]
            errors.append(float(d @ full[:2, :2] @ d))
        d = floats[row, :2] - w[row, :2]
        assert float(d @ full[:2, :2] @ d) <= min(errors) * (1 + 1e-3) + 1e-9


def test_formats_that_do_not_exist():
    for to, group in itertools.product(("int8", "int4", "int5"), (None, 32, 48)):
        if (to, group) not in (("int8", None), ("int4", 32)):
            with pytest.raises(ValueError, match=r"to must be one of|group must be one of"):
                Format(to, group)
