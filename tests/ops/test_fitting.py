"""Fallbacks of kernels that exceed a card's resources: smaller configurations, their cache, and finally torch's operations."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from triton.runtime.errors import OutOfResources, PTXASError

import linattn
from linattn.ops import gpu
from linattn.ops.triton import fitting, launch
from linattn.ops.triton.fitting import Tiles, Unfit
from tests.ops.cases import arguments, make

CARD = gpu.Card((8, 6), 99 << 10, 82)
FAILED = RuntimeError("PassManager::run failed")


class Kernel:
    """Kernel whose launches fit if ``fits`` accepts their constants; ``tried`` records all."""

    def __init__(self, fits, error: Exception | None = None) -> None:
        self.fn, self.fits, self.tried = SimpleNamespace(__name__="scan"), fits, []
        self.error = OutOfResources(120 << 10, 99 << 10, "shared memory") if error is None else error

    def __getitem__(self, grid):
        def run(*_, **constants):
            self.tried.append((grid, constants))
            if not self.fits(constants):
                raise self.error
            return "compiled"

        return run


@pytest.fixture(autouse=True)
def forgotten(monkeypatch):
    monkeypatch.setattr(fitting, "driver", SimpleNamespace(active=SimpleNamespace(get_current_device=lambda: 0)))
    fitting.forget()
    yield
    fitting.forget()


def start(kernel: Kernel, tiles: Tiles | None = None, **constants):
    return fitting.launch(kernel, (8, 1, 1), (torch.zeros(2), 3, None), constants, tiles)


def test_what_fits_is_launched_as_it_is():
    kernel = Kernel(lambda c: True)
    assert start(kernel, BV=64, num_stages=3) == ("compiled", (8, 1, 1)) and len(kernel.tried) == 1


def test_stages_come_first_then_tiles_then_warps():
    kernel = Kernel(lambda c: False)
    tiles = Tiles({"BV": 16, "BK": 32}, lambda c: (512 // c["BV"], 1, 1))
    with pytest.raises(Unfit, match="scan does not fit this GPU: it needs 122880 of shared memory, and there are 101376"):
        start(kernel, tiles, BV=64, BK=64, num_warps=8, num_stages=3)
    tried = [(c["num_stages"], c["BV"], c["BK"], c["num_warps"], grid[0]) for grid, c in kernel.tried[1:]]
    assert tried == [
        (3, 64, 64, 8, 8), (2, 64, 64, 8, 8), (1, 64, 64, 8, 8), (1, 32, 64, 8, 16), (1, 32, 32, 8, 16),
        (1, 64, 64, 16, 8), (1, 32, 64, 16, 16), (1, 32, 32, 16, 16),
    ]  # fmt: skip


def test_registers_of_all_threads_fit_a_multiprocessor():
    constants = {"num_warps": 8, "num_stages": 1, "BV": 32, **fitting.registers(8)}
    tried = [constants | change for change in fitting.shapes(constants, Tiles({"BV": 16}, lambda sizes: (1, 1, 1)))]
    assert {t["num_warps"] for t in tried} == {8, 16} and fitting.registers(4) == {}
    assert all(32 * t["num_warps"] * t["maxnreg"] <= fitting.REGISTERS for t in tried)


def test_what_served_is_remembered_for_its_kind_alone():
    kernel = Kernel(lambda c: c["num_stages"] < 2 or c["BV"] < 64)
    start(kernel, BV=64, num_stages=3)
    before = len(kernel.tried)
    assert start(kernel, BV=64, num_stages=3)[0] == "compiled"
    assert len(kernel.tried) == before + 1 and kernel.tried[-1][1]["num_stages"] == 1
    start(kernel, BV=32, num_stages=3)
    assert kernel.tried[-1][1]["num_stages"] == 3
    assert fitting.chosen(kernel, (torch.zeros(2), 3, None), {"BV": 64, "num_stages": 3})["num_stages"] == 1


def test_each_device_has_its_own(monkeypatch):
    kernel = Kernel(lambda c: c["num_stages"] < 3)
    start(kernel, num_stages=3)
    kernel.fits = lambda c: True
    monkeypatch.setattr(fitting, "driver", SimpleNamespace(active=SimpleNamespace(get_current_device=lambda: 1)))
    start(kernel, num_stages=3)
    assert kernel.tried[-1][1]["num_stages"] == 3


def test_what_fits_nowhere_is_not_tried_again():
    kernel = Kernel(lambda c: False, FAILED)
    for _ in range(2):
        with pytest.raises(Unfit, match="Triton's compiler fails with RuntimeError: PassManager::run failed"):
            start(kernel, num_stages=1)
    assert len(kernel.tried) == 2


@pytest.mark.parametrize("error", [RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"), TypeError("missing")])
def test_other_errors_pass(error):
    with pytest.raises(type(error), match=str(error)[:20].replace("[", r"\[")):
        start(Kernel(lambda c: False, error), num_stages=3)
    assert fitting.reason_of(PTXASError("`ptxas` failed")) == "Triton's compiler fails with PTXASError: PTXAS error: `ptxas` failed"


@pytest.fixture
def unfit(monkeypatch):
    """Treat CPU tensors as a GPU's on which no kernel fits; returns the kernels that were tried."""
    bodies = []

    def run(body, *_, **__):
        bodies.append(body.__name__)
        raise Unfit("scan does not fit this GPU: it needs too much")

    monkeypatch.setattr(gpu, "_known", lambda *_: CARD)
    monkeypatch.setattr(launch, "run", run)
    return bodies


KINDS = [("plain", "BTH"), ("beta", "BTHK"), ("erase", "BTH"), ("bonus", "BTHK"), ("normalize", "H")]


@pytest.mark.parametrize(("kind", "rank"), KINDS)
def test_the_recurrence_and_its_gradients_come_from_torch(kind, rank, unfit):
    call = make(kind, rank, T=30).to(torch.float32)

    def both(backend):
        leaves = {n: t.detach().requires_grad_() for n, t in call.tensors.items()}
        out = linattn.linear_attention(**arguments(leaves, {**call.options, "return_state": True}), form="chunk", backend=backend)
        flat = [t for x in out for t in (x if isinstance(x, tuple) else (x,))]
        return flat, torch.autograd.grad(sum(t.sum() for t in flat), list(leaves.values()))

    with pytest.warns(UserWarning, match="a GPU kernel of linattn cannot run here, so PyTorch operations run instead: scan does not fit"):
        found = both("triton")
    for mine, theirs in zip((t for ts in found for t in ts), (t for ts in both("torch") for t in ts), strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-5, atol=1e-5)
    assert "_forward" in unfit


def test_explain_says_what_did_not_fit(unfit, capsys):
    call = make("plain", "BTH", T=30, initial=False).to(torch.float32)
    with pytest.warns(UserWarning, match="does not fit"):
        linattn.linear_attention(**call.arguments(), form="chunk", backend="triton")
    assert "triton: no, scan does not fit this GPU: it needs too much" in linattn.explain(**call.arguments(), form="chunk")
    other = make("plain", "BTHK", T=30, initial=False).to(torch.float32)
    assert "triton: runs" in linattn.explain(**other.arguments(), form="chunk")


def test_gradients_that_do_not_fit_leave_the_forward_pass_its_kernels(unfit):
    call = make("plain", "BTH", T=30, initial=False).to(torch.float32)
    x = [torch.ones_like(call.tensors[n]).requires_grad_() for n in "qkv"]
    from linattn.ops.triton import chunks as kernels

    with pytest.warns(UserWarning, match="does not fit"):
        kernels.backward(torch.ones_like(x[2]), None, *x, *(None,) * 7, 0.5, False, *(None,) * 8)
    none = "triton: runs" in linattn.explain(*(t.detach() for t in x), form="chunk")
    wanted = "triton: no, scan does not fit" in linattn.explain(*x, form="chunk")
    assert none and wanted


def test_other_operations_come_from_torch(unfit):
    from linattn.ops import norms, short_convolution

    x, weight = torch.randn(2, 9, 8).requires_grad_(), torch.randn(8).requires_grad_()
    for op in (
        lambda backend: norms.rms_norm(x, weight, x, eps=1e-6, backend=backend),
        lambda backend: short_convolution.short_convolution(x, weight[:, None, None].expand(8, 1, 4), backend=backend),
    ):
        with pytest.warns(UserWarning, match="does not fit"):
            y = op("triton")
        found = torch.autograd.grad(y.square().sum(), (x, weight))
        fitting.forget()
        wanted = torch.autograd.grad(op("torch").square().sum(), (x, weight))
        assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-5) for a, b in zip(found, wanted, strict=True))
    assert set(unfit) == {"_forward"}  # backward passes are not tried then


CU = torch.tensor([0, 4, 4, 9])


def scans():
    """Calls of the scans with all arguments, by name."""
    torch.manual_seed(3)
    log, x, first = -torch.rand(1, 9, 6), torch.randn(1, 9, 6), torch.randn(3, 6)
    log[0, 5, 2] = -torch.inf
    b, a, state = torch.randn(1, 9, 4), -torch.rand(6, 4), torch.randn(3, 6, 4)
    packed = {"cu_seqlens": CU, "return_state": True}
    return {
        "sum": (linattn.diagonal_scan, (log, x), {"initial_state": first, **packed}),
        "constant": (linattn.diagonal_scan, (-torch.rand(6), x), {"return_state": True}),
        "maximum": (linattn.running_max, (log, x), {"initial_state": first, **packed}),
        "selective": (linattn.selective_scan, (x, torch.rand(1, 9, 6), a, b, b.flip(1), torch.rand(6)), {"initial_state": state, **packed}),
    }


def outcome(op, tensors, options, backend):
    """Results, and gradients of tensors and initial state."""
    leaves = [t.clone().requires_grad_() for t in tensors]
    more = {n: t.clone().requires_grad_() if n == "initial_state" else t for n, t in options.items()}
    results = op(*leaves, backend=backend, **more)
    loss = sum((r.nan_to_num(neginf=0.0) * torch.linspace(0, 1, r.numel()).view(r.shape)).sum() for r in results)
    wanted = [*leaves, *([more["initial_state"]] if "initial_state" in more else [])]
    return [*results, *torch.autograd.grad(loss, wanted)]


@pytest.mark.parametrize("kind", scans())
def test_scans_and_their_gradients_come_from_torch(kind, unfit):
    op, tensors, options = scans()[kind]
    with pytest.warns(UserWarning, match="does not fit"):
        found = outcome(op, tensors, options, "triton")
    for mine, theirs in zip(found, outcome(op, tensors, options, "torch"), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
    assert unfit
    with pytest.raises(ValueError, match="does not fit"):  # afterwards it is refused at once
        op(*tensors, backend="triton", **options)
    assert op(*tensors, **options)[0].shape == found[0].shape


def steps():
    """Steps in place: a function that runs one by a backend, and its state."""
    from linattn.ops.convolution_step import step_
    from linattn.ops.recurrent_step import recurrent_step_
    from linattn.ops.selective_step import selective_step_

    torch.manual_seed(4)
    q, k, v = (torch.randn(2, 1, 3, 8) for _ in "qkv")
    log, beta = -torch.rand(2, 1, 3), torch.rand(2, 1, 3)
    x, b = torch.randn(2, 6), torch.randn(2, 4)
    return {
        "recurrent": (
            lambda s, backend: recurrent_step_(s, q, k, v, decay=log, beta=beta, unit=1e-6, backend=backend), torch.randn(2, 3, 8, 8),
        ),
        "selective": (
            lambda s, backend: selective_step_(s, x, x.abs(), -torch.ones(6, 4), b, b, z=x, softplus=True, backend=backend),
            torch.randn(2, 6, 4),
        ),
        "convolution": (lambda s, _: step_(x[:, None], s, torch.ones(6, 1, 4), None, True), torch.randn(2, 3, 6)),
    }  # fmt: skip


@pytest.mark.parametrize("kind", steps())
def test_steps_in_place_come_from_torch(kind, unfit, monkeypatch):
    run, state = steps()[kind]
    mine, theirs = state.clone(), state.clone()
    with pytest.warns(UserWarning, match="does not fit"):
        y = run(mine, "triton")
    assert len(unfit) == 1
    assert run(state.clone(), "auto").shape == y.shape and len(unfit) == 1  # not tried again
    monkeypatch.undo()
    torch.testing.assert_close(y, run(theirs, "torch"), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
