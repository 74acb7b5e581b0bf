"""The short convolution: every form against its definition, and the definition against a loop and torch's own convolution."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from linattn.mixers.context import CallContext
from linattn.mixers.parts import ShortConvolution
from linattn.ops import flops
from linattn.ops.short_convolution import short_convolution
from linattn.ops.torch import short_convolution as portable
from tests.ops.errors import error

B, D = 2, 5


def arguments(W: int = 4, T: int = 9, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(W * 100 + T)
    shapes = {"x": (B, T, D), "weight": (D, 1, W), "bias": (D,), "before": (B, W - 1, D)}
    return {name: torch.randn(shape, generator=g, dtype=torch.float64).to(dtype).requires_grad_() for name, shape in shapes.items()}


def gradients(function, a: dict[str, Tensor], **options) -> list[Tensor]:
    """The result, and the gradients of a weighted sum of it."""
    y = function(**a, **options)
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).bfloat16().to(y.dtype)
    return [y, *torch.autograd.grad(y, list(a.values()), weights)]


def loop(x: Tensor, weight: Tensor, bias: Tensor, before: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for b in range(x.shape[0]):
        for t in range(x.shape[1]):
            for d in range(x.shape[2]):
                z = bias[d].item()
                for i in range(weight.shape[2]):
                    s = t - (weight.shape[2] - 1) + i
                    z += weight[d, 0, i].item() * (x[b, s, d] if s >= 0 else before[b, s, d]).item()
                out[b, t, d] = z / (1 + torch.tensor(-z, dtype=torch.float64).exp().item())
    return out


def conv1d(x: Tensor, weight: Tensor, bias: Tensor | None = None, before: Tensor | None = None, activation: bool = True) -> Tensor:
    before = x.new_zeros(x.shape[0], weight.shape[2] - 1, x.shape[2]) if before is None else before
    if x.shape[1] == 0:
        return x
    y = F.conv1d(torch.cat([before, x], 1).mT, weight, bias, groups=x.shape[2]).mT
    return F.silu(y) if activation else y


def blocks(monkeypatch, numbers: int = 2 * D) -> None:
    monkeypatch.setattr(portable, "BLOCK", numbers)


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_against_a_loop(backend, monkeypatch):
    blocks(monkeypatch)
    a = {name: t.detach() for name, t in arguments().items()}
    torch.testing.assert_close(short_convolution(**a, backend=backend), loop(**a), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("numbers", [1, 2 * D, 3 * 9 * D, 1 << 16])
@pytest.mark.parametrize("W", [1, 2, 4, 8])
@pytest.mark.parametrize("T", [1, 2, 9])
@pytest.mark.parametrize("activation", [True, False])
def test_against_conv1d_with_gradients(activation, T, W, numbers, monkeypatch):
    blocks(monkeypatch, numbers)
    a = arguments(W, T)
    wanted = gradients(conv1d, a, activation=activation)
    for backend in ("reference", "torch"):
        mine = gradients(short_convolution, a, activation=activation, backend=backend)
        assert all(error(m, w) <= 1e-13 for m, w in zip(mine, wanted, strict=True))


def test_without_bias_and_tokens_before(monkeypatch):
    blocks(monkeypatch)
    a = {name: t for name, t in arguments().items() if name in ("x", "weight")}
    for m, w in zip(gradients(short_convolution, a), gradients(conv1d, a), strict=True):
        assert error(m, w) <= 1e-13


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rounded_once(dtype, monkeypatch):
    """Sums are float32 whatever x is, so a half-precision result is the exact one rounded."""
    blocks(monkeypatch)
    a = arguments(dtype=dtype)
    wanted = gradients(conv1d, {name: t.detach().double().requires_grad_() for name, t in a.items()})
    for m, w in zip(gradients(short_convolution, a), wanted, strict=True):
        assert m.dtype == dtype and error(m, w) <= max(1.01 * error(w.to(dtype), w), 1e-6)


def test_a_wide_weight_beside_half_precision():
    a = {
        name: t if name in ("weight", "bias") else t.detach().bfloat16().requires_grad_()
        for name, t in arguments(dtype=torch.float32).items()
    }
    y, *grads = gradients(short_convolution, a)
    assert y.dtype == torch.bfloat16 and [g.dtype for g in grads] == [t.dtype for t in a.values()]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_taps_have_channels_side_by_side(dtype):
    """Like the tokens that they are multiplied by."""
    assert portable._taps(torch.zeros(1, 2, 5, dtype=dtype), torch.zeros(5, 1, 3, dtype=dtype)).is_contiguous()


def test_the_result_is_contiguous_whatever_came():
    x = torch.randn(B, D, 9).mT
    y = short_convolution(x, torch.randn(D, 1, 4))
    assert y.is_contiguous() and not x.is_contiguous()


@pytest.mark.parametrize("shape", [(2, 0, D), (0, 3, D)])
def test_nothing_to_do(shape):
    x, a = torch.randn(shape, requires_grad=True), arguments(dtype=torch.float32)
    y = short_convolution(x, a["weight"], a["bias"])
    assert y.shape == shape
    assert not any(g.any() for g in torch.autograd.grad(y.sum(), (x, a["weight"], a["bias"])))


def test_second_derivatives():
    a = arguments(3, 4)
    assert torch.autograd.gradgradcheck(lambda *t: short_convolution(*t[:3], before=t[3]), list(a.values()))


def test_transforms_and_graphs():
    a = {name: t.detach() for name, t in arguments(3, 4).items()}
    wanted = conv1d(**a)
    mapped = torch.vmap(lambda x, before: short_convolution(x[None], a["weight"], a["bias"], before=before[None])[0])(a["x"], a["before"])
    torch.testing.assert_close(mapped, wanted)
    _, tangent = torch.func.jvp(lambda w: short_convolution(a["x"], w), (a["weight"],), (a["weight"],))
    torch.testing.assert_close(tangent, torch.func.jvp(lambda w: conv1d(a["x"], w), (a["weight"],), (a["weight"],))[1])
    torch._dynamo.reset()
    compiled = torch.compile(short_convolution, fullgraph=True, backend="aot_eager")
    leaves = {name: t.requires_grad_() for name, t in a.items()}
    for m, w in zip(gradients(compiled, leaves), gradients(conv1d, leaves), strict=True):
        torch.testing.assert_close(m, w)
    torch._dynamo.reset()


def test_operators():
    operator = torch.ops.linattn.short_convolution.default
    a = arguments(3, 4)
    for bias, before in ((a["bias"], a["before"]), (None, None)):
        torch.library.opcheck(operator, (a["x"], before, a["weight"], bias, True, "torch"))


def test_operations_are_counted():
    a = arguments()
    with flops.counter() as counter:
        y = short_convolution(**a)
    assert counter.get_total_flops() == 2 * B * 9 * D * 4
    with flops.counter() as counter:
        torch.autograd.grad(short_convolution(**a), list(a.values()), torch.ones_like(y))
    assert counter.get_total_flops() == 3 * 2 * B * 9 * D * 4


@pytest.mark.parametrize("lengths", [(9,), (4, 5), (1, 1, 0, 7), (0, 2, 6, 1)])
def test_packed_sequences_and_their_states(lengths):
    """Packed in two calls with a state, against each sequence in one call."""
    conv = ShortConvolution(D, 4, bias=True).double()
    torch.nn.init.normal_(conv.bias)
    x, more = (torch.randn(1, 9, D, dtype=torch.float64, requires_grad=True) for _ in range(2))
    cu = torch.tensor([0, *lengths]).cumsum(0)
    first = CallContext(x, cu_seqlens=cu)
    y = conv(x, first)
    second = CallContext(more, {**first.new, "position": cu.diff()}, cu_seqlens=cu)
    y = torch.cat([y, conv(more, second)])
    parts = [torch.cat([a, b], 1) for a, b in zip(x.split(lengths, 1), more.split(lengths, 1), strict=True)]
    alone = [conv1d(t, conv.weight, conv.bias) for t in parts]
    wanted = torch.cat(
        [
            torch.cat([t[:, :n] for t, n in zip(alone, lengths, strict=True)], 1),
            torch.cat([t[:, n:] for t, n in zip(alone, lengths, strict=True)], 1),
        ]
    )
    leaves = [x, more, conv.weight, conv.bias]
    for m, w in zip(
        (y, *torch.autograd.grad(y.square().sum(), leaves)), (wanted, *torch.autograd.grad(wanted.square().sum(), leaves)), strict=True
    ):
        torch.testing.assert_close(m, w)


@pytest.mark.parametrize("lengths", [None, (9, 4), (0, 1)])
@pytest.mark.parametrize("tokens", [(9, 9), (2, 9)])
def test_states_of_rows(lengths, tokens):
    conv = ShortConvolution(D, 4).double()
    first, second = (torch.randn(B, n, D, dtype=torch.float64) for n in tokens)
    if lengths is None:
        real = torch.full((B,), tokens[0])
    else:
        real = torch.tensor(lengths).clamp(max=tokens[0])
    call = CallContext(first, lengths=None if lengths is None else real)
    conv(first, call)
    state = {**call.new, "position": real}
    y = conv(second, CallContext(second, state))
    for b, n in enumerate(real.tolist()):
        whole = torch.cat([first[b : b + 1, :n], second[b : b + 1]], 1)
        torch.testing.assert_close(y[b : b + 1], conv1d(whole, conv.weight)[:, n:])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x": torch.zeros(3, 4)}, r"x must have shape \[B, T, D\]"),
        ({"weight": torch.zeros(4, 2, 3)}, r"weight must have shape \[D, 1, W\] with D = 4"),
        ({"bias": torch.zeros(3)}, r"bias must have shape \[D\]"),
        ({"bias": torch.zeros(4, dtype=torch.int64)}, "bias must be torch.float64 or .*, but came as torch.int64"),
        ({"activation": "silu"}, "activation must be True .* or False, but came as 'silu'"),
        ({"before": torch.zeros(1, 3, 4)}, r"before must have shape \[B, W - 1, D\]"),
        ({"before": torch.zeros(1, 2, 4).double()}, "before must be torch.float32"),
        ({"backend": "cpu", "weight": torch.zeros(4, 1, 5)}, "up to 4 taps"),
    ],
)
def test_refusals(change, words):
    given = {"x": torch.zeros(1, 5, 4), "weight": torch.zeros(4, 1, 3)} | change
    with pytest.raises(ValueError, match=words):
        short_convolution(**given)
