"""Public door of the selective scan (Mamba): a diagonal recurrence whose step, input and output maps come from the token."""

from __future__ import annotations

import torch
from torch import Tensor

from linattn.ops import checks

BACKENDS = ("auto", "reference", "torch")


def selective_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    *,
    initial_state: Tensor | None = None,
    return_state: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """``h_t = exp(Δ_t A) ⊙ h_{t-1} + (Δ_t x_t) B_t`` and ``y_t = h_t C_t + D x_t``: S6, the scan of Mamba (arXiv 2312.00752).

    Each of the ``D`` channels of x has a state of ``N`` numbers; B and C are shared by all channels. As in the paper's code B is
    discretised by Euler's rule, Δ B, and not by the zero-order hold of its text.

    Args:
        x: inputs [B, T, D]: float64, float32, bfloat16 or float16.
        dt: time steps Δ [B, T, D], at least 0 (after softplus); 0 passes the state on unchanged and writes nothing.
        A: [D, N], at most 0.
        B, C: [B, T, N].
        D: [D], how much of x passes by the state; None: nothing.
        initial_state: [rows, D, N] in float32 (float64 for float64).
        return_state: return ``(y, h)``, h the last states [rows, D, N].
        cu_seqlens: [rows + 1] integers: the batch is 1 and its sequences, empty ones allowed, lie end to end.
        backend: ``"reference"`` (token by token), ``"torch"`` (every device), or ``"auto"``: torch.

    All but x may be float32 beside a half-precision x; sums are float32 (float64 for float64).

    Returns:
        y [B, T, D] in the dtype of x, and the state if asked for.

    Raises:
        ValueError: naming the argument, what came and what was wanted.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(map(repr, BACKENDS))}, but came as {backend!r}")
    if checks.tensor("x", x).ndim != 3:
        raise ValueError(f"x must have shape [B, T, D], but came with {list(x.shape)}")
    checks.dtype("x", x, *checks.DTYPES)
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    batch, tokens, width = x.shape
    size = A.shape[-1] if checks.tensor("A", A, x).ndim == 2 else 0
    wanted = [("dt", dt, "[B, T, D]", (batch, tokens, width)), ("A", A, "[D, N]", (width, size))]
    wanted += [(name, t, "[B, T, N]", (batch, tokens, size)) for name, t in (("B", B), ("C", C))]
    if D is not None:
        wanted.append(("D", D, "[D]", (width,)))
    for name, t, dims, full in wanted:
        checks.shape(name, checks.tensor(name, t, x), dims, full)
        checks.dtype(name, t, x.dtype, wide)
    checks.not_positive("A", A)
    if dt.numel() and checks.values_visible(dt) and bool((dt < 0).any()):
        raise ValueError(f"dt is a time step and must be >= 0, but its smallest value is {dt.min().item():g}")
    if cu_seqlens is not None:
        checks.packed_lengths(cu_seqlens, x)
    rows = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if initial_state is None:
        initial_state = x.new_zeros(rows, width, size, dtype=wide)
    checks.shape("initial_state", checks.tensor("initial_state", initial_state, x), "[rows, D, N]", (rows, width, size))
    checks.dtype("initial_state", initial_state, wide)
    with checks.no_autocast(x):
        run = _load(backend)
        y, last = run(*(t.to(wide) for t in (x, dt, A, B, C)), initial_state, cu_seqlens)
        y = (y if D is None else torch.addcmul(y, x.to(wide), D.to(wide))).to(x.dtype)
    return (y, last) if return_state else y


def _load(backend: str):
    if backend == "reference":
        from linattn.ops.reference.selective_scan import selective_scan as run
    else:
        from linattn.ops.torch.selective_scan import selective_scan as run
    return run
