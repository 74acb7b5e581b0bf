"""The shared parts against torch's own and against their definitions."""

import pytest
import torch
from torch import nn

from linattn.mixers.context import CallContext
from linattn.mixers.parts import HeadNorm, ShortConvolution, rotate, unit
from linattn.ops.features import elu1


def convolution(width=4, **options):
    conv = ShortConvolution(6, width, **options).double()
    theirs = nn.Conv1d(6, 6, width, groups=6, padding=width - 1, bias=conv.bias is not None).double()
    if conv.bias is not None:
        nn.init.normal_(conv.bias)
    theirs.load_state_dict(conv.state_dict())
    activation = nn.functional.silu if conv.activation else nn.Identity()
    return conv, lambda x: activation(theirs(x.mT)[..., : x.shape[1]].mT)


@pytest.mark.parametrize("width", [0, -1, 2.5, True])
def test_short_convolutions_want_a_width(width):
    with pytest.raises(ValueError, match=f"conv_width must be an integer of at least 1, but came as {width}"):
        ShortConvolution(6, width)


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("options", [{}, {"bias": True}, {"activation": False}])
def test_short_convolution_is_a_causal_conv1d(width, options):
    conv, theirs = convolution(width, **options)
    for tokens in (1, 2, 9):
        x = torch.randn(2, tokens, 6, dtype=torch.float64)
        torch.testing.assert_close(conv(x, CallContext(x)), theirs(x))


def test_short_convolution_keeps_the_last_inputs_of_every_layout():
    conv, theirs = convolution()
    x = torch.randn(1, 9, 6, dtype=torch.float64)
    packed, cu = x, torch.tensor([0, 1, 1, 6, 9])
    call = CallContext(packed, cu_seqlens=cu)
    y = conv(packed, call)
    wanted = torch.cat([theirs(part) for part in (x[:, :1], x[:, 1:6], x[:, 6:])], 1)
    torch.testing.assert_close(y, wanted)
    zero = torch.zeros(3, 6, dtype=torch.float64)
    kept = torch.stack([torch.cat([zero[:2], x[0, :1]]), zero, x[0, 3:6], x[0, 6:]])
    torch.testing.assert_close(call.new["conv"], kept)
    ragged = CallContext(x.expand(2, -1, -1), lengths=torch.tensor([2, 7]))
    conv(x.expand(2, -1, -1), ragged)
    torch.testing.assert_close(ragged.new["conv"], torch.stack([torch.cat([zero[:1], x[0, :2]]), x[0, 4:7]]))


def test_a_kept_state_does_not_keep_the_sequence_alive():
    conv, _ = convolution()
    x = torch.randn(1, 1000, 6, dtype=torch.float64)
    call = CallContext(x)
    conv(x, call)
    assert call.new["conv"].untyped_storage().nbytes() == 3 * 6 * 8


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_is_a_complex_product(interleaved):
    x, angles = torch.randn(2, 5, 3, 8, dtype=torch.float64), torch.randn(2, 5, 4, dtype=torch.float64)
    turned = rotate(x, angles, interleaved=interleaved)
    pairs = [(2 * i, 2 * i + 1) if interleaved else (i, i + 4) for i in range(4)]
    for i, (a, b) in enumerate(pairs):
        wanted = torch.complex(x[..., a], x[..., b]) * torch.exp(1j * angles[..., None, i])
        torch.testing.assert_close(torch.complex(turned[..., a], turned[..., b]), wanted)


def test_head_norm():
    norm, o = HeadNorm((3, 8)), torch.randn(2, 5, 3, 8)
    nn.init.normal_(norm.weight)
    torch.testing.assert_close(norm(o), nn.functional.rms_norm(o, (8,), eps=1e-5) * norm.weight)
    assert norm.bfloat16()(o.bfloat16()).dtype == torch.bfloat16
    assert not list(HeadNorm(8, affine=False).parameters())


def test_head_norm_with_a_gate():
    norm, o, gate = HeadNorm((3, 8)), torch.randn(2, 5, 3, 8), torch.randn(2, 5, 3, 8)
    nn.init.normal_(norm.weight)
    torch.testing.assert_close(norm(o, gate), nn.functional.rms_norm(o, (8,), eps=1e-5) * norm.weight * gate * gate.sigmoid())


def test_unit_length():
    x = torch.randn(3, 8, dtype=torch.float64)
    torch.testing.assert_close(unit(x, eps=0.0).norm(dim=-1), torch.ones(3, dtype=torch.float64))
    assert not unit(torch.zeros(3, 8)).any() and unit(x.bfloat16()).dtype == torch.float32
    assert torch.equal(unit(x.float(), dtype=torch.bfloat16), unit(x.float()).bfloat16())


def test_elu1_keeps_its_digits():
    x = torch.linspace(-60, 5, 200)
    exact = torch.where(x > 0, x.double() + 1, x.double().exp())
    torch.testing.assert_close(elu1(x).double(), exact, rtol=1e-6, atol=0)
    assert torch.autograd.gradcheck(elu1, torch.tensor([-3.0, -0.1, 0.2, 4.0], dtype=torch.float64, requires_grad=True))
