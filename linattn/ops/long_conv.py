"""Public functions of linear time-invariant systems: convolution with any kernel, and a system with initial and final state.

A system is ``h_t = A h_{t-1} + B u_t``, ``y_t = Re(C h_t)``, one for each channel; its impulse response C A^l B is a kernel as
long as the sequence. :func:`long_conv` convolves with an arbitrary kernel, without a state. :func:`lti` convolves by matrix
products inside chunks and carries the state between them: exactly causal, and not slower than Fourier transforms.
"""

from __future__ import annotations

from typing import Any, Literal, TypedDict, Unpack, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from linattn.ops import checks, sharding

SIZE = 64  # tokens of a chunk
_DOUBLE = (torch.float64, torch.complex128)


@sharding.refuses("its kernel spans the whole sequence")
def long_conv(u: Tensor, kernel: Tensor) -> Tensor:
    """Compute the causal convolution ``y_t = sum over s <= t of kernel_{t-s} u_s`` by real fast Fourier transforms.

    The length of the transforms is the smallest product of 2, 3, 5 and 7 that is at least T + L - 1. Transforms spread rounding
    errors over the whole sequence: later tokens change earlier outputs by up to 1e-7 of the largest one in float32, and a NaN
    reaches every token of its channel.

    Args:
        u: [B, T, D], or [B, T, D, V] for V signals through each channel's kernel.
        kernel: [L, D], any L; taps beyond T are not used. May be float32 (float64) beside half-precision u.

    Returns:
        y in the shape and dtype of u, contiguous. Sums are float32, float64 if u or the kernel is.

    Raises:
        ValueError: naming the argument, what came and what was wanted.
    """
    _signal(u)
    checks.tensor("kernel", kernel, u)
    if kernel.ndim != 2 or kernel.shape[1] != u.shape[2]:
        raise ValueError(f"kernel must have shape [L, D] with D = {u.shape[2]} of u, but came with {list(kernel.shape)}")
    if not kernel.is_floating_point():
        raise ValueError(f"kernel must be floating point, but came as {kernel.dtype}")
    tokens = u.shape[1]
    taps = kernel[:tokens]
    if u.numel() == 0 or taps.numel() == 0:
        return torch.zeros_like(u) + u[:, :0].sum() + kernel[:0].sum()  # zeros with gradients of zero
    compute_dtype = torch.float64 if torch.float64 in (u.dtype, kernel.dtype) else torch.float32
    n = fast_length(tokens + taps.shape[0] - 1)
    spectrum = torch.fft.rfft(taps.to(compute_dtype).mT, n)  # [D, n / 2 + 1]
    signal = torch.fft.rfft(u.to(compute_dtype).movedim(1, -1), n)  # [B, D, (V,) n / 2 + 1]
    y = torch.fft.irfft(signal * (spectrum if u.ndim == 3 else spectrum[:, None]), n)[..., :tokens]
    # A copy, since to() may return a view that keeps the transforms in memory.
    return y.movedim(-1, 1).to(u.dtype, memory_format=torch.contiguous_format).contiguous()


class _Options(TypedDict, total=False):
    """Keywords that do not affect the return type."""

    lengths: Tensor | None
    cu_seqlens: Tensor | None


@overload
def lti(
    u: Tensor, A: Tensor, B: Tensor, C: Tensor, initial_state: Tensor | None = None, *,
    return_state: Literal[False] = False, **options: Unpack[_Options],
) -> Tensor: ...  # fmt: skip
@overload
def lti(
    u: Tensor, A: Tensor, B: Tensor, C: Tensor, initial_state: Tensor | None = None, *,
    return_state: Literal[True], **options: Unpack[_Options],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def lti(
    u: Tensor, A: Tensor, B: Tensor, C: Tensor, initial_state: Tensor | None = None, *,
    return_state: bool, **options: Unpack[_Options],
) -> Any: ...  # fmt: skip
@sharding.shards
def lti(
    u: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    initial_state: Tensor | None = None,
    *,
    return_state: bool = False,
    lengths: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """``h_t = A h_{t-1} + B u_t``, ``y_t = Re(C h_t)`` (S4, S4D, H3), the convolution with its impulse response.

    Args:
        u: [B, T, D], or [B, T, D, V] for V signals through each channel's system.
        A: [D, K] natural logarithms of a diagonal transition, real or complex, finite, with a real part of at most 0; or
            [D, K, K] the transition itself, whose powers must stay bounded.
        B: [D, K], weights of the input in the state.
        C: [D, K], weights of the state in the output. Of a conjugate pair one is given with twice its C.
        initial_state: [N, D, K], or [N, D, K, V], in the dtype of A: float32, or float64 if u or A is, or their complex kind.
        return_state: also return the state after the last token of each sequence.
        lengths: [B] integers: only the first ``lengths[b]`` tokens of row b are real; the state is that after them, and
            later outputs are undefined.
        cu_seqlens: [N + 1] integers: B is 1 and N sequences lie end to end. Each is padded to a row of T tokens.

    Returns:
        y in the shape and dtype of u; and the state if asked for.

    Raises:
        ValueError: naming the argument, what came and what was wanted.
    """
    _signal(u)
    checks.flag("return_state", return_state)
    compute_dtype = _check_system(u, A, B, C)
    if cu_seqlens is not None:
        if lengths is not None:
            raise ValueError("lengths and cu_seqlens exclude each other: packed sequences have no padding")
        checks.packed_lengths(cu_seqlens, u)
    elif lengths is not None:
        checks.row_lengths(lengths, u)
    rows = u.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    full = (rows, *A.shape[:2], *u.shape[3:])
    if initial_state is not None:
        checks.shape("initial_state", checks.tensor("initial_state", initial_state, u), "[N, D, K] or [N, D, K, V]", full)
        checks.dtype("initial_state", initial_state, compute_dtype)
    with checks.no_autocast(u):
        system = _system(A.to(compute_dtype), B.to(compute_dtype), C.to(compute_dtype))
        x = u if u.ndim == 4 else u[..., None]
        if cu_seqlens is not None:
            x, lengths = _unpack(x, cu_seqlens)
        elif lengths is not None:
            x = torch.where((torch.arange(x.shape[1], device=x.device) < lengths[:, None])[..., None, None], x, 0.0)
        state = system.b.new_zeros(*full[:3], x.shape[3]) if initial_state is None else initial_state.reshape(*full[:3], x.shape[3])
        y, last = _run(system, x.to(_real(compute_dtype)), state, lengths, return_state)
        if cu_seqlens is not None:
            y = _pack(y, cu_seqlens, u.shape[1])
        y = y.reshape(u.shape).to(u.dtype)
    return (y, last.reshape(full)) if return_state else y


def impulse_response(A: Tensor, B: Tensor, C: Tensor, tokens: int) -> Tensor:
    """Compute the kernel real(C A^l B), l < ``tokens``, of :func:`lti`: [T, D]. ``long_conv(u, kernel)`` is ``lti(u, A, B, C)``."""
    inner = 1 << (tokens.bit_length() // 2)  # near the root of T, so that both factors are short
    system = _system(A, B, C)
    written = system.powers_of(system.b, inner)  # [D, c, K]
    read = system.powers_of(system.c, -(-tokens // inner), inner, left=True)  # [D, T / c, K]
    return (_reals(read.conj()) @ _reals(written).mT).flatten(1)[:, :tokens].mT


def fast_length(n: int) -> int:
    """The smallest product of 2, 3, 5 and 7 that is at least ``n``."""
    best = 1
    while best < n:
        best *= 2
    seven = 1
    while seven < best:
        five = seven
        while five < best:
            three = five
            while three < best:
                length = three
                while length < n:
                    length *= 2
                best = min(best, length)
                three *= 3
            five *= 5
        seven *= 7
    return best


class _System:
    """B and C [D, K], and products of the powers A^(2^k) of the transition with rows [D, ..., K]."""

    def __init__(self, a: Tensor, b: Tensor, c: Tensor) -> None:
        self.a, self.b, self.c = a, b, c

    def times(self, k: int, h: Tensor, left: bool = False) -> Tensor:
        """A^(2^k) h, or h A^(2^k) if ``left``."""
        raise NotImplementedError

    def steps(self, n: int, h: Tensor) -> Tensor:
        """A^n h."""
        for k in range(n.bit_length()):
            if n >> k & 1:
                h = self.times(k, h)
        return h

    def powers_of(self, h: Tensor, n: int, stride: int = 1, left: bool = False) -> Tensor:
        """[D, K] -> [D, n, K]: h, A^stride h, A^(2 stride) h, ..., stride a power of two."""
        rows, k = h[:, None], stride.bit_length() - 1
        while rows.shape[1] < n:
            rows, k = torch.cat([rows, self.times(k, rows, left)], 1), k + 1
        return rows[:, :n]


class _Diagonal(_System):
    """System whose A holds the logarithms of a diagonal [D, K]."""

    def times(self, k: int, h: Tensor, left: bool = False) -> Tensor:
        factor = torch.exp(self.a * 2.0**k)
        return h * factor.view(factor.shape[0], *[1] * (h.ndim - 2), factor.shape[1])


class _Dense(_System):
    """System whose A holds matrices [D, K, K]; powers by squaring."""

    def __init__(self, a: Tensor, b: Tensor, c: Tensor) -> None:
        super().__init__(a, b, c)
        self.powers = [a]

    def times(self, k: int, h: Tensor, left: bool = False) -> Tensor:
        while len(self.powers) <= k:
            self.powers.append(self.powers[-1] @ self.powers[-1])
        return (h.flatten(1, -2) @ (self.powers[k] if left else self.powers[k].mT)).view(h.shape)


def _system(A: Tensor, B: Tensor, C: Tensor) -> _System:
    return (_Diagonal if A.ndim == 2 else _Dense)(A, B, C)


def _run(system: _System, u: Tensor, state: Tensor, lengths: Tensor | None, returning: bool) -> tuple[Tensor, Tensor]:
    """``u`` [B, T, D, V] in the real dtype of the system, ``state`` [B, D, K, V]: y like u, and the last state if ``returning``.

    Channels come first inside, so that each chunk is a row of its channel's matrix.
    """
    batch, tokens, channels, signals = u.shape
    if u.numel() == 0:
        return u, state
    size = min(SIZE, 1 << (tokens - 1).bit_length())
    n = -(-tokens // size)
    u = F.pad(u, (0, 0, 0, 0, 0, n * size - tokens))
    x = u.permute(0, 3, 1, 2).reshape(-1, channels).t().contiguous().view(channels, -1, size)  # [D, B V n, c]
    h = state.permute(1, 0, 3, 2).flatten(1, 2)  # [D, B V, K]
    written = system.powers_of(system.b, size)  # [D, c, K]
    backwards = _reals(written.flip(1))  # the last token of a chunk has the last row
    collected = _like(x @ backwards, system.b).unflatten(1, (-1, n))  # [D, B V, n, K]
    before = _accumulated(system, torch.cat([h[:, :, None], collected], 2), size.bit_length() - 1)  # [D, B V, n + 1, K]
    kernel = (_reals(written) @ _reals(system.c.conj())[..., None])[..., 0]  # [D, c]
    read = _reals(system.powers_of(system.times(0, system.c[:, None], left=True)[:, 0], size, left=True).conj())  # [D, c, K]
    y = torch.baddbmm(x @ _toeplitz(kernel).mT, _reals(before[:, :, :n].flatten(1, 2)), read.mT)
    y = y.view(channels, -1).t().reshape(batch, signals, n * size, channels).permute(0, 2, 3, 1)[:, :tokens]
    if not returning:
        return y, state
    if lengths is None:
        whole, rest = before[:, :, tokens // size], tokens % size
        if rest:
            tail = x.unflatten(1, (-1, n))[:, :, -1, :rest]  # [D, B V, r]
            whole = system.steps(rest, whole) + _like(tail @ backwards[:, size - rest :], system.b)
    else:
        whole = _last_of_each(system, u, before.unflatten(1, (batch, signals)), backwards, lengths, size)
    return y, whole.unflatten(1, (batch, signals)).permute(1, 0, 3, 2).contiguous()


def _toeplitz(kernel: Tensor) -> Tensor:
    """Toeplitz matrices [D, c, c] of kernels [D, c]: entry i - j of the kernel, 0 above the diagonal."""
    c = kernel.shape[1]
    return F.pad(kernel, (c - 1, 0)).unfold(1, c, 1).flip(-1)


def _accumulated(system: _System, h: Tensor, k: int) -> Tensor:
    """Running ``s_j = A^(2^k) s_{j-1} + h_j`` over the third axis of [D, M, n, K], by pairs."""
    n = h.shape[2]
    if n == 1:
        return h
    odd = _accumulated(system, system.times(k, h[:, :, 0 : n - n % 2 : 2]) + h[:, :, 1::2], k + 1)
    even = torch.cat([h[:, :, :1], system.times(k, odd[:, :, : (n - 1) // 2]) + h[:, :, 2::2]], 2)
    if n % 2:
        return torch.cat([torch.stack([even[:, :, :-1], odd], 3).flatten(2, 3), even[:, :, -1:]], 2)
    return torch.stack([even, odd], 3).flatten(2, 3)


def _last_of_each(system: _System, u: Tensor, before: Tensor, backwards: Tensor, lengths: Tensor, size: int) -> Tensor:
    """State [D, B V, K] after each row's number of tokens: the state before its last chunk plus the chunk's part."""
    row, rest = torch.arange(u.shape[0], device=u.device), lengths % size
    whole = before[:, row, :, lengths // size].transpose(0, 1)  # [D, B, V, K]
    for k in range(size.bit_length() - 1):
        whole = torch.where((rest >> k & 1).bool()[:, None, None], system.times(k, whole), whole)
    place = lengths[:, None] - size + torch.arange(size, device=u.device)  # [B, c]
    tail = torch.where((place >= (lengths - rest)[:, None])[..., None, None], u[row[:, None], place.clamp(min=0)], 0.0)
    return whole.flatten(1, 2) + _like(tail.permute(2, 0, 3, 1).flatten(1, 2) @ backwards, system.b)


def _reals(rows: Tensor) -> Tensor:
    """View complex [..., K] as real [..., 2 K], where real(a · b) is the product of conj(a) and b."""
    return torch.view_as_real(rows.resolve_conj()).flatten(-2) if rows.is_complex() else rows


def _like(rows: Tensor, like: Tensor) -> Tensor:
    """Invert :func:`_reals` if ``like`` is complex."""
    return torch.view_as_complex(rows.unflatten(-1, (-1, 2))) if like.is_complex() else rows


def _unpack(x: Tensor, cu: Tensor) -> tuple[Tensor, Tensor]:
    """Pad each packed sequence to a row of T tokens; also returns the lengths."""
    lengths, token = cu.diff().long(), torch.arange(x.shape[1], device=x.device)
    if x.shape[1] == 0:
        return x.expand(lengths.shape[0], *x.shape[1:]), lengths
    place = (cu[:-1, None].long() + token).clamp(max=x.shape[1] - 1)
    return torch.where((token < lengths[:, None])[..., None, None], x[0][place], 0.0), lengths


def _pack(y: Tensor, cu: Tensor, tokens: int) -> Tensor:
    token = torch.arange(tokens, device=y.device)
    n = torch.searchsorted(cu[1:].contiguous(), token, right=True)
    return y[n, token - cu[n]][None]


def _real(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype in _DOUBLE else torch.float32


def _signal(u: Tensor) -> None:
    if checks.tensor("u", u).ndim not in (3, 4):
        raise ValueError(f"u must have shape [B, T, D] or [B, T, D, V], but came with {list(u.shape)}")
    checks.dtype("u", u, *checks.DTYPES)


def _check_system(u: Tensor, A: Tensor, B: Tensor, C: Tensor) -> torch.dtype:
    """Check the system; returns the dtype of the state."""
    channels = u.shape[2]
    if checks.tensor("A", A, u).ndim not in (2, 3) or A.shape[0] != channels or A.shape[1] != A.shape[-1]:
        raise ValueError(f"A must have shape [D, K] or [D, K, K] with D = {channels} of u, but came with {list(A.shape)}")
    for name, t in (("B", B), ("C", C)):
        checks.shape(name, checks.tensor(name, t, u), "[D, K]", tuple(A.shape[:2]))
    for name, t in (("A", A), ("B", B), ("C", C)):
        if not (t.is_complex() or t.is_floating_point()):
            raise ValueError(f"{name} must be floating point or complex, but came as {t.dtype}")
        if t.is_complex() and not A.is_complex():
            raise ValueError(f"A must be complex because {name} is {t.dtype}, but came as {A.dtype}")
    if A.ndim == 2:
        checks.not_positive("A", A.real if A.is_complex() else A)
    double = any(t.dtype in _DOUBLE for t in (u, A))
    if A.is_complex():
        return torch.complex128 if double else torch.complex64
    return torch.float64 if double else torch.float32
