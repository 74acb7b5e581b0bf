"""HiPPO (arXiv 2008.07669): state spaces whose state is the best polynomial, or Fourier, memory of their input.

Every function returns A [K, K] and B [K] in float64. The continuous system ``x' = A x + B u`` keeps in x the coefficients of
u's past in an orthonormal basis; :func:`basis` evaluates that basis, so that ``basis(measure, K, s) @ x`` reconstructs the past:

* ``legs``: all of the past [0, t] with equal weight. Its system is ``x' = (A x + B u) / t``; s in [0, 1] is the position in [0, t].
* ``legt``, ``fourier``: the last unit of time; s in [0, 1] is the age. For a window of length w divide A and B by w.
* ``lagt``: the past faded by exp(-s / 2); s >= 0 is the age.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor


def legs(size: int) -> tuple[Tensor, Tensor]:
    """Scaled Legendre: A_nk = −√((2n + 1)(2k + 1)) below the diagonal, −(n + 1) on it; B_n = √(2n + 1)."""
    b = _legendre(size)
    return -((b[:, None] * b).tril() - torch.diag(_index(size))), b


def legt(size: int) -> tuple[Tensor, Tensor]:
    """Translated Legendre: A_nk = −√((2n + 1)(2k + 1)), times (−1)^(n − k) above the diagonal; B_n = √(2n + 1)."""
    b, signs = _legendre(size), (-1.0) ** _index(size)
    full = b[:, None] * b
    return -(full.tril() + (full * signs[:, None] * signs).triu(1)), b


def lagt(size: int) -> tuple[Tensor, Tensor]:
    """Translated Laguerre: A_nk = −1 below the diagonal, −1/2 on it; B_n = 1."""
    ones = torch.ones(_checked(size), size, dtype=torch.float64)
    return torch.eye(size, dtype=torch.float64) / 2 - ones.tril(), ones[0]


def fourier(size: int) -> tuple[Tensor, Tensor]:
    """Truncated Fourier (arXiv 2206.12037), an even size: 1, 0 and then √2 cos, √2 sin of 2π s, 4π s, ...

    The sine of frequency 0 is kept, as in the paper, so that states come in pairs; it is always 0.
    """
    _even(size)
    b = torch.zeros(size, dtype=torch.float64)
    b[0::2], b[0] = math.sqrt(2.0), 1.0
    turn = torch.zeros(size, size, dtype=torch.float64)
    for n in range(size // 2):
        turn[2 * n, 2 * n + 1], turn[2 * n + 1, 2 * n] = -2 * math.pi * n, 2 * math.pi * n
    return turn - 2 * b[:, None] * b, 2 * b


MEASURES: dict[str, Callable[[int], tuple[Tensor, Tensor]]] = {"legs": legs, "legt": legt, "lagt": lagt, "fourier": fourier}


def basis(measure: str, size: int, s: Tensor) -> Tensor:
    """Evaluate the basis functions at ``s`` [...]: [..., K]; see the module's description."""
    if measure not in MEASURES:
        raise ValueError(f"measure must be one of {', '.join(MEASURES)}, but came as {measure!r}")
    _checked(size)
    s = s.double()
    if measure == "fourier":
        _even(size)
        angles = 2 * math.pi * s[..., None] * torch.arange(size // 2, device=s.device)
        pairs = torch.stack([angles.cos(), angles.sin()], -1) * math.sqrt(2.0)
        pairs[..., 0, 0] = 1.0
        return pairs.flatten(-2)
    if measure == "lagt":
        values = _recursion(size, s, lambda n, p, before: ((2 * n + 1 - s) * p - n * before) / (n + 1))
        return values * torch.exp(-s / 2)[..., None]
    z = 2 * s - 1 if measure == "legs" else 1 - 2 * s
    values = _recursion(size, z, lambda n, p, before: ((2 * n + 1) * z * p - n * before) / (n + 1))
    return values * _legendre(size).to(s.device)


def nplr(size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``legs`` as a normal matrix plus one of rank 1 (S4, arXiv 2111.00396): A = V (Diag(Λ) − P P*) V*, B̃ = V* B.

    Returns:
        Λ, P, B̃ [K / 2] and V [K, K / 2], complex128: one of each conjugate pair, those with positive imaginary parts, the
        smallest first. The real part of Λ is −1/2 throughout.

    Raises:
        ValueError: for an odd size.
    """
    if _checked(size) % 2:
        raise ValueError(f"size must be even, since eigenvalues come in conjugate pairs, but came as {size}")
    a, b = legs(size)
    p = torch.sqrt(_index(size) + 0.5)
    skew = a + p[:, None] * p + 0.5 * torch.eye(size, dtype=torch.float64)
    frequency, v = torch.linalg.eigh(-1j * ((skew - skew.mT) / 2))  # ascending; the negative half first
    frequency, v = frequency[size // 2 :], v[:, size // 2 :]
    return torch.complex(torch.full_like(frequency, -0.5), frequency), v.mH @ p.to(v.dtype), v.mH @ b.to(v.dtype), v


def _recursion(size: int, x: Tensor, step: Callable[[int, Tensor, Tensor], Tensor]) -> Tensor:
    """Evaluate orthogonal polynomials by their three-term recursion; step(0, 1, 0) is the polynomial of degree 1."""
    values, before = [torch.ones_like(x)], torch.zeros_like(x)
    for n in range(size - 1):
        values.append(step(n, values[-1], before))
        before = values[-2]
    return torch.stack(values, -1)


def _index(size: int) -> Tensor:
    return torch.arange(_checked(size), dtype=torch.float64)


def _legendre(size: int) -> Tensor:
    return torch.sqrt(2 * _index(size) + 1)


def _even(size: int) -> None:
    if _checked(size) % 2:
        raise ValueError(f"size of fourier must be even, for pairs of cosine and sine, but came as {size}")


def _checked(size: int) -> int:
    if size < 1:
        raise ValueError(f"size must be at least 1, but came as {size}")
    return size
