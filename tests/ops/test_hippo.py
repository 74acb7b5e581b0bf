"""HiPPO's matrices: the state of the differential equation reconstructs the past."""

import numpy as np
import pytest
import torch

from linattn.ops import hippo


def u(t: torch.Tensor) -> torch.Tensor:
    return torch.sin(5 * t) + 0.5 * torch.cos(11 * t)


def burst(t: torch.Tensor) -> torch.Tensor:
    """A signal with a start, as Laguerre's functions need."""
    return torch.sin(2 * t) * torch.exp(-(((t - 26) / 4) ** 2))


def integrated(a: torch.Tensor, b: torch.Tensor, t: torch.Tensor, signal, *, scaled: bool = False) -> torch.Tensor:
    """x at the last of the times ``t``, by the implicit midpoint rule; scaled: x' = (A x + B u) / t."""
    x, eye = torch.zeros_like(b), torch.eye(len(b), dtype=b.dtype)
    for start, stop in zip(t[:-1], t[1:], strict=True):
        step, middle = stop - start, (start + stop) / 2
        h = step / middle if scaled else step
        x = torch.linalg.solve(eye - h / 2 * a, x + h / 2 * (a @ x) + h * b * signal(middle))
    return x


def error(measure: str, size: int) -> float:
    """Error of the reconstructed past, well inside the window, since Fourier sums ring at its edges."""
    end, start = {"legs": 2.0, "lagt": 30.0}.get(measure, 3.0), 1e-6 if measure == "legs" else 0.0
    signal, times = burst if measure == "lagt" else u, torch.linspace(start, end, 4001, dtype=torch.float64)
    x = integrated(*hippo.MEASURES[measure](size), times, signal, scaled=measure == "legs")
    s = torch.linspace(0.1, 0.9, 50, dtype=torch.float64)
    wanted = signal(end * s) if measure == "legs" else signal(end - s)
    return ((hippo.basis(measure, size, s) @ x - wanted).norm() / wanted.norm()).item()


@pytest.mark.parametrize(
    ("measure", "size", "tolerance"), [("legs", 32, 1e-4), ("legt", 32, 1e-4), ("lagt", 128, 1e-3), ("fourier", 64, 0.05)]
)
def test_the_state_reconstructs_the_past(measure, size, tolerance):
    whole = error(measure, size)
    assert whole < tolerance
    assert whole < 0.7 * error(measure, size // 8), "more coefficients, a better memory"


@pytest.mark.parametrize("measure", ["legs", "legt", "fourier"])
def test_the_basis_is_orthonormal(measure):
    nodes, weights = map(torch.from_numpy, np.polynomial.legendre.leggauss(200))
    f = hippo.basis(measure, 12, (nodes + 1) / 2)
    if measure == "fourier":
        f = torch.cat([f[:, :1], f[:, 2:]], 1)  # without the sine of frequency 0
    gram = (f * weights[:, None] / 2).mT @ f
    torch.testing.assert_close(gram, torch.eye(gram.shape[0], dtype=torch.float64), atol=1e-12, rtol=0)


def test_laguerre_is_orthonormal():
    nodes, weights = map(torch.from_numpy, np.polynomial.laguerre.laggauss(60))
    f = hippo.basis("lagt", 12, nodes) * torch.exp(nodes / 2)[:, None]
    torch.testing.assert_close((f * weights[:, None]).mT @ f, torch.eye(12, dtype=torch.float64), atol=1e-10, rtol=0)


def test_what_decays_with_lagt_is_its_basis():
    a, b = hippo.lagt(10)
    s = torch.tensor([0.0, 0.3, 2.0, 7.0], dtype=torch.float64)
    kernels = torch.stack([torch.linalg.matrix_exp(a * t) @ b for t in s])
    torch.testing.assert_close(hippo.basis("lagt", 10, s), kernels, atol=1e-12, rtol=0)


def test_nplr():
    a, b = hippo.legs(16)
    w, p, b_tilde, v = hippo.nplr(16)
    v_all = torch.cat([v, v.conj()], 1)
    low = torch.cat([p, p.conj()])
    middle = torch.diag(torch.cat([w, w.conj()])) - low[:, None] * low.conj()
    torch.testing.assert_close((v_all @ middle @ v_all.mH).real, a, atol=1e-11, rtol=0)
    torch.testing.assert_close((v_all @ torch.cat([b_tilde, b_tilde.conj()])).real, b, atol=1e-11, rtol=0)
    assert (w.real == -0.5).all() and (w.imag > 0).all() and (w.imag.diff() > 0).all()


@pytest.mark.parametrize(
    "call", [lambda: hippo.legs(0), lambda: hippo.fourier(3), lambda: hippo.nplr(5), lambda: hippo.basis("fourier", 3, torch.zeros(1))]
)
def test_refusals(call):
    with pytest.raises(ValueError, match="size"):
        call()
    with pytest.raises(ValueError, match="measure must be one of"):
        hippo.basis("legendre", 4, torch.zeros(1))
