"""The kernels on ARM, cross-compiled and emulated: plain NEON, and with products of bfloat16. Skipped without the tools."""

import pytest
import torch

import linattn
from linattn.ops.cpu import gated, norms, scan, selective_scan, short_convolution
from tests.ops.cases import make
from tests.ops.cpu.emulated import compiled
from tests.ops.errors import check_gradients, check_values, error

pytestmark = pytest.mark.slow
CPU = {"backend": "cpu"}
BFLOAT16 = torch.bfloat16


@pytest.fixture(scope="module")
def arm(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        return compiled(tmp_path_factory.mktemp("arm"), patch)


@pytest.fixture(params=["portable", "neonbf16"])
def level(request, arm, monkeypatch):
    arm.install(monkeypatch, request.param)
    return request.param


@pytest.fixture
def neon(arm, monkeypatch):
    for module in (scan, selective_scan, short_convolution, norms, gated):
        monkeypatch.setattr(module, "call", arm.call)
    arm.install(monkeypatch, "portable")
    return arm


@pytest.mark.parametrize(("cpu", "wanted"), [("max", "neonbf16"), ("cortex-a72", "portable")])
def test_the_instruction_set_follows_the_processor(arm, cpu, wanted):
    assert arm.best(cpu) == wanted


@pytest.mark.parametrize(
    ("level", "dtype"), [("portable", torch.float32), ("portable", torch.float16), ("portable", BFLOAT16), ("neonbf16", BFLOAT16)],
    indirect=["level"],
)  # fmt: skip
@pytest.mark.parametrize(
    ("kind", "rank"),
    [("plain", "none"), ("plain", "BTH"), ("plain", "BTHK"), ("beta", "BTH"), ("beta", "BTHK"), ("erase", "BTHK"), ("bonus", "BTHK")],
)  # fmt: skip
def test_the_recurrence(arm, level, kind, rank, dtype):
    call = make(kind, rank, B=1, T=70, H=2, Hk=1, K=20, V=37)
    arm.calls.clear()
    check_values(call, dtype, **CPU)
    check_gradients(call, dtype, **CPU)
    assert {f"linattn_linear_attention_{level}", f"linattn_linear_attention_backward_{level}"} <= set(arm.calls)


def test_products_of_bfloat16_are_taken(arm, level, monkeypatch):
    call = make("plain", "BTH", B=1, T=70, H=2, Hk=1, K=20, V=37).to(BFLOAT16)
    here = call(**CPU)["o"]
    arm.install(monkeypatch, "portable")
    assert torch.equal(here, call(**CPU)["o"]) == (level == "portable")


def check(function, tensors, limit):
    """Values and gradients of ``function(tensors, backend=)`` beside the reference's in float64."""
    sides = []
    for backend, dtype in (("cpu", torch.float32), ("reference", torch.float64)):
        leaves = [t.detach().to(dtype).requires_grad_() for t in tensors]
        out = function(*leaves, backend=backend)
        weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(0)).to(dtype)
        sides.append([out, *torch.autograd.grad(out, leaves, weights)])
    for mine, wanted in zip(*sides, strict=True):
        assert error(mine.double(), wanted, floor=1e-30) <= limit


def normal(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def test_the_scans(neon):
    check(linattn.diagonal_scan, [-normal(2, 70, 37).abs(), normal(2, 70, 37)], 2e-6)
    check(linattn.running_max, [-normal(2, 70, 37).abs(), normal(2, 70, 37)], 2e-6)
    assert {"linattn_scan_forward_portable", "linattn_scan_backward_portable"} <= set(neon.calls)


def test_the_selective_scan(neon):
    x, dt, a, b, c = normal(1, 70, 20), normal(1, 70, 20).exp(), -normal(20, 5).exp(), normal(1, 70, 5), normal(1, 70, 5)
    check(linattn.selective_scan, [x, dt * 0.1, a, b, c], 1e-5)
    assert {"linattn_selective_scan_forward_portable", "linattn_selective_scan_backward_portable"} <= set(neon.calls)
