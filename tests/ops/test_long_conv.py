"""``long_conv`` and ``lti`` against loops over the tokens, with states, packings, lengths and derivatives."""

import time

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

import linattn
from linattn.ops.long_conv import fast_length, impulse_response

SYSTEMS = ("complex", "real", "dense")


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def system(kind: str, D: int = 3, K: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    """A, B and C in float64."""
    if kind == "dense":
        a = normal(D, K, K, seed=1)
        return a / torch.linalg.matrix_norm(a, 2)[:, None, None], normal(D, K, seed=2), normal(D, K, seed=3)
    a, b, c = -0.3 * normal(D, K, seed=1).abs(), normal(D, K, seed=2), normal(D, K, seed=3)
    if kind == "real":
        return a, b, c
    return tuple(torch.complex(t, normal(D, K, seed=4 + i)) for i, t in enumerate((a, b, c)))


def loop(u: Tensor, A: Tensor, B: Tensor, C: Tensor, h: Tensor | None) -> tuple[Tensor, Tensor]:
    """The equations, a token at a time: u [B, T, D], h [B, D, K]."""
    a = torch.diag_embed(A.exp()) if A.ndim == 2 else A
    h = B.new_zeros(u.shape[0], *B.shape) if h is None else h
    out = [u[:, :0]]
    for t in range(u.shape[1]):
        h = (a @ h[..., None])[..., 0] + B * u[:, t, :, None]
        y = (C * h).sum(-1)
        out.append((y.real if y.is_complex() else y)[:, None])
    return torch.cat(out, 1), h


def close(mine: tuple[Tensor, ...], wanted: tuple[Tensor, ...], tolerance: float = 1e-12) -> None:
    for a, b in zip(mine, wanted, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        assert not b.numel() or (a - b).abs().max() <= tolerance * b.abs().max().clamp(min=1)


@pytest.mark.parametrize("tokens", [0, 1, 2, 7, 64, 97, 300])
@pytest.mark.parametrize("taps", [1, 5, 97, 400])
def test_long_conv(tokens, taps):
    u, kernel = normal(2, tokens, 3), normal(taps, 3, seed=1)
    wanted = torch.zeros_like(u)
    for lag in range(min(taps, tokens)):
        wanted[:, lag:] += kernel[lag] * u[:, : tokens - lag]
    close((linattn.long_conv(u, kernel),), (wanted,))
    wide = u[..., None] * normal(4, seed=2)
    close((linattn.long_conv(wide, kernel),), (wanted[..., None] * normal(4, seed=2),))


def test_precision():
    u, kernel = normal(2, 4096, 8).float(), (normal(4096, 8, seed=1) * torch.exp(-torch.arange(4096.0) / 300)[:, None]).float()
    wanted = linattn.long_conv(u.double(), kernel.double())
    assert (linattn.long_conv(u, kernel) - wanted).norm() < 1e-6 * wanted.norm()
    half = linattn.long_conv(u.bfloat16(), kernel)
    rounded = linattn.long_conv(u.bfloat16().double(), kernel.double())
    assert half.dtype == torch.bfloat16 and (half - rounded).norm() < 2e-3 * wanted.norm()


@pytest.mark.parametrize("signals", [(), (2,)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_result_keeps_no_memory_of_transforms(dtype, signals):
    """They would be as long as u and the kernel together."""
    y = linattn.long_conv(torch.ones(2, 9, 3, *signals, dtype=dtype), torch.ones(9, 3, dtype=dtype))
    assert y.is_contiguous() and y.untyped_storage().nbytes() == y.nbytes


def test_lengths_of_transforms():
    def slow(n: int) -> int:
        while True:
            rest = n
            for prime in (2, 3, 5, 7):
                while rest % prime == 0:
                    rest //= prime
            if rest == 1:
                return n
            n += 1

    assert [fast_length(n) for n in range(1, 3000)] == [slow(n) for n in range(1, 3000)]


def test_gradients():
    u, kernel = normal(2, 9, 3).requires_grad_(), normal(6, 3, seed=1).requires_grad_()
    assert gradcheck(linattn.long_conv, (u, kernel))


@pytest.mark.parametrize("kind", SYSTEMS)
@pytest.mark.parametrize("tokens", [0, 1, 2, 3, 17, 64, 100, 200, 333])
@pytest.mark.parametrize("resumed", [False, True])
def test_lti(kind, tokens, resumed):
    A, B, C = system(kind)
    u, h = normal(2, tokens, 3), None
    if resumed:
        _, h = loop(normal(2, 5, 3, seed=9), A, B, C, None)
    close(linattn.lti(u, A, B, C, h, return_state=True), loop(u, A, B, C, h))
    if tokens > 1:  # in pieces: decoding by the recurrence
        y, state = linattn.lti(u[:, :-1], A, B, C, h, return_state=True)
        last, state = linattn.lti(u[:, -1:], A, B, C, state, return_state=True)
        close((torch.cat([y, last], 1), state), loop(u, A, B, C, h))


@pytest.mark.parametrize("shape", [(0, 5, 3), (2, 0, 3), (2, 5, 0)])
@pytest.mark.parametrize("signals", [(), (4,)])
def test_nothing_to_do(shape, signals):
    batch, _, channels = shape
    A, B, C = (t[:channels] for t in system("complex"))
    u = normal(*shape, *signals).requires_grad_()
    y, last = linattn.lti(u, A, B, C, torch.zeros(batch, channels, A.shape[1], *signals, dtype=A.dtype), return_state=True)
    assert y.shape == u.shape and last.shape == (batch, channels, A.shape[1], *signals)

    for taps in (0, 4):
        kernel = normal(taps, channels).requires_grad_()
        y = linattn.long_conv(u, kernel)
        assert y.shape == u.shape and not any(g.any() for g in torch.autograd.grad(y.sum(), (u, kernel)))


@pytest.mark.parametrize("kind", SYSTEMS)
def test_several_signals_through_a_channel(kind):
    A, B, C = system(kind)
    u = normal(2, 20, 3, 4)
    _, h = linattn.lti(normal(2, 5, 3, 4, seed=9), A, B, C, return_state=True)
    y, last = linattn.lti(u, A, B, C, h, return_state=True)
    parts = [loop(u[..., i], A, B, C, h[..., i]) for i in range(4)]
    close((y, last), (torch.stack([p[0] for p in parts], -1), torch.stack([p[1] for p in parts], -1)))


@pytest.mark.parametrize("kind", SYSTEMS)
@pytest.mark.parametrize("resumed", [False, True])
def test_packed_and_ragged(kind, resumed):
    A, B, C = system(kind)
    counts = [0, 130, 1, 0, 64, 0]
    cu, n = torch.tensor([0, *counts]).cumsum(0), len(counts)
    u = normal(1, 195, 3)
    h = loop(normal(n, 5, 3, seed=9), A, B, C, None)[1] if resumed else None
    parts = [loop(p, A, B, C, None if h is None else h[i : i + 1]) for i, p in enumerate(u.split(counts, 1))]
    wanted = torch.cat([p[0] for p in parts], 1), torch.cat([p[1] for p in parts])
    close(linattn.lti(u, A, B, C, h, return_state=True, cu_seqlens=cu), wanted)
    for slots in (130, 1):  # 1: a step in which some rows have no token
        x, lengths = torch.full((n, slots, 3), 7.0, dtype=torch.float64), torch.tensor(counts).clamp(max=slots)
        for i, part in enumerate(u.split(counts, 1)):
            x[i, : lengths[i]] = part[0, : lengths[i]]
        y, last = linattn.lti(x, A, B, C, h, return_state=True, lengths=lengths)
        for i, count in enumerate(lengths):
            alone = loop(x[i : i + 1, :count], A, B, C, None if h is None else h[i : i + 1])
            close((y[i : i + 1, :count], last[i : i + 1]), alone)


@pytest.mark.parametrize("kind", SYSTEMS)
@pytest.mark.parametrize("tokens", [1, 11])
def test_gradients_of_lti(kind, tokens):
    A, B, C = system(kind, D=2, K=2)
    h = loop(normal(2, 5, 2, seed=9), A, B, C, None)[1]
    inputs = [t.detach().clone().requires_grad_() for t in (normal(2, tokens, 2), A, B, C, h)]
    assert gradcheck(lambda *a: linattn.lti(*a, return_state=True), inputs)
    cu = torch.tensor([0, tokens, tokens])
    assert gradcheck(lambda u, *a: linattn.lti(u[:1], *a, return_state=True, cu_seqlens=cu), inputs)


def test_long_sequences_in_float32():
    A, B, C = (t.to(torch.complex64) for t in system("complex", D=4, K=8))
    A = torch.complex(A.real * 0.003, A.imag)  # memory of a thousand tokens
    u = normal(1, 3000, 4).float()
    y, last = linattn.lti(u, A, B, C, return_state=True)
    wanted, final = loop(u.double(), *(t.to(torch.complex128) for t in (A, B, C)), None)
    assert (y - wanted).norm() < 1e-4 * wanted.norm() and (last - final).norm() < 1e-4 * final.norm()


@pytest.mark.parametrize("kind", SYSTEMS)
@pytest.mark.parametrize("tokens", [1, 40, 65, 500])
def test_the_convolution_is_the_system(kind, tokens):
    A, B, C = system(kind)
    impulse = torch.eye(tokens, 1, dtype=torch.float64)[None].expand(1, tokens, 3)
    kernel, u = impulse_response(A, B, C, tokens), normal(2, tokens, 3)
    close((kernel,), (loop(impulse, A, B, C, None)[0][0],))
    close((linattn.lti(u, A, B, C),), (linattn.long_conv(u, kernel),))


def test_causal_to_the_bit():
    A, B, C = system("complex")
    u, other = normal(2, 200, 3), 100 * normal(2, 200, 3, seed=5)
    y = linattn.lti(u, A, B, C)
    for t in (1, 63, 64, 130):
        changed = linattn.lti(torch.cat([u[:, :t], other[:, t:]], 1), A, B, C)
        assert torch.equal(changed[:, :t], y[:, :t]) and not torch.equal(changed[:, t], y[:, t])


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"u": torch.zeros(2, 3)}, "u must have shape"),
        ({"A": torch.zeros(2, 4)}, "A must have shape"),
        ({"A": torch.ones(3, 4)}, "A is the natural logarithm"),
        ({"B": torch.zeros(3, 5)}, "B must have shape"),
        ({"C": torch.zeros(3, 4, dtype=torch.complex64)}, "A must be complex because C is torch.complex64"),
        ({"C": torch.zeros(3, 4, dtype=torch.int64)}, "C must be floating point or complex"),
        ({"initial_state": torch.zeros(2, 3)}, "initial_state must have shape"),
        ({"initial_state": torch.zeros(2, 3, 4, dtype=torch.float64)}, "initial_state must be torch.float32"),
        ({"lengths": torch.zeros(3)}, "lengths must have shape"),
        ({"lengths": torch.zeros(2), "cu_seqlens": torch.zeros(2)}, "exclude each other"),
        ({"cu_seqlens": torch.tensor([0, 5])}, "B must be 1"),
    ],
    ids=str,
)
def test_refusals(change, error):
    arguments = {"u": torch.zeros(2, 5, 3), "A": torch.zeros(3, 4), "B": torch.zeros(3, 4), "C": torch.zeros(3, 4)}
    with pytest.raises(ValueError, match=error):
        linattn.lti(**(arguments | change))


def test_refusals_of_long_conv():
    for kernel, error in ((torch.zeros(4, 2), r"kernel must have shape \[L, D\]"), (torch.zeros(4, 3).int(), "must be floating point")):
        with pytest.raises(ValueError, match=error):
            linattn.long_conv(torch.zeros(2, 5, 3), kernel)
    with pytest.raises(ValueError, match="u must have shape"):
        linattn.long_conv(torch.zeros(2, 5), torch.zeros(4, 5))


@pytest.mark.parametrize("tokens", [1021, 2048])
def test_not_slower_than_plain_transforms(tokens):
    u, kernel = normal(2, tokens, 32).float(), normal(tokens, 32, seed=1).float()

    def plain() -> Tensor:
        f = torch.fft.rfft(u, n=2 * tokens, dim=1) * torch.fft.rfft(kernel, n=2 * tokens, dim=0)
        return torch.fft.irfft(f, n=2 * tokens, dim=1)[:, :tokens]

    best = [float("inf")] * 2
    for _ in range(15):  # alternating, because of other load
        for i, way in enumerate((lambda: linattn.long_conv(u, kernel), plain)):
            start = time.perf_counter()
            way()
            best[i] = min(best[i], time.perf_counter() - start)
    assert best[0] < 1.5 * best[1], f"{best[0] * 1e3:.2f} ms, plain transforms {best[1] * 1e3:.2f} ms"
