"""Public function of the selective scan (Mamba): a diagonal recurrence whose time step, input and output maps depend on the token."""

from __future__ import annotations

from types import ModuleType
from typing import Any, Literal, NamedTuple, TypedDict, Unpack, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from linattn.ops import checks, dispatch, sharding, tracing
from linattn.ops.inputs import Backend
from linattn.ops.operator import Operator, Pass
from linattn.ops.torch import selective_scan as portable


class _Options(TypedDict, total=False):
    """Keywords that do not affect the return type."""

    bias: Tensor | None
    softplus: bool
    z: Tensor | None
    initial_state: Tensor | None
    cu_seqlens: Tensor | None
    backend: Backend


@overload
def selective_scan(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None, *,
    return_state: Literal[False] = False, **options: Unpack[_Options],
) -> Tensor: ...  # fmt: skip
@overload
def selective_scan(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None, *,
    return_state: Literal[True], **options: Unpack[_Options],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def selective_scan(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None, *,
    return_state: bool, **options: Unpack[_Options],
) -> Any: ...  # fmt: skip
@sharding.shards
def selective_scan(  # noqa: PLR0913  public
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    softplus: bool = False,
    z: Tensor | None = None,
    initial_state: Tensor | None = None,
    return_state: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute ``h_t = exp(Δ_t A) ⊙ h_{t-1} + (Δ_t x_t) B_t`` and ``y_t = h_t C_t + D x_t``: S6, the scan of Mamba (arXiv 2312.00752).

    Each of the ``D`` channels of x has a state of ``N`` numbers; B and C are shared by all channels. B is discretised by
    Euler's rule, Δ B, as in the paper's code, not by the zero-order hold of its text.

    Args:
        x: inputs [B, T, D]: float64, float32, bfloat16 or float16.
        dt: time steps Δ [B, T, D], at least 0 (after bias and softplus); 0 leaves the state unchanged.
        A: [D, N], at most 0.
        B, C: [B, T, N].
        D: [D], weight of x in y beside the state; None: 0.
        bias, softplus: Δ is ``dt + bias``, [D], and the softplus of that, in the dtype of sums.
        z: a gate [B, T, D], y times silu(z); None: no gate. On a CPU all three are part of the kernel where no gradients are wanted.
        initial_state: [rows, D, N] in float32 (float64 for float64).
        return_state: return ``(y, h)``, h the last states [rows, D, N].
        cu_seqlens: [rows + 1] integers: the batch is 1 and its sequences, empty ones allowed, lie end to end.
        backend: ``"reference"`` (token by token), ``"torch"`` (every device), ``"triton"`` and ``"cpu"`` (kernels of a GPU and of a
            CPU, in float32, without gradients of gradients), or ``"auto"``: the kernels where they run the call, else torch.
            ``linattn.explain(linattn.selective_scan, ...)`` says which and why.

    All but x may be float32 beside a half-precision x; sums are float32 (float64 for float64).

    Returns:
        y [B, T, D] in the dtype of x, and the state if asked for.

    Raises:
        ValueError: naming the argument, what came and what was wanted.
    """
    checks.flag("softplus", softplus)
    checks.flag("return_state", return_state)
    call = _Call(x, dt, A, B, C, D, initial_state, cu_seqlens)
    if bias is not None or softplus or z is not None:
        y, last = _gated(call, bias, softplus, z, backend)
    else:
        _check(call)
        y, last = call.run(backend)
    return (y, last) if return_state else y


def _gated(call: _Call, bias: Tensor | None, softplus: bool, z: Tensor | None, backend: str) -> tuple[Tensor, Tensor]:
    """Run the scan with the operations before and after it, inside the kernel or around it."""
    _check(call, positive=True)  # a bias may make them positive
    _check_gated(call.x, bias, z)
    tensors = (*call, bias, z)
    inside = softplus and not tracing.wanted(*tensors) and not tracing.traced(*tensors)
    if inside and dispatch.choose(backend, call.refusal) == "cpu":
        from linattn.ops.cpu import selective_scan as native

        return native.gated(call, bias=bias, softplus=True, z=z)[:2]
    call = call._replace(dt=_step(call.x, call.dt, bias, softplus))
    _check(call)
    y, last = call.run(backend)
    return (y if z is None else (y * F.silu(z)).to(call.x.dtype)), last


def _check_gated(x: Tensor, bias: Tensor | None, z: Tensor | None) -> None:
    full = x.shape
    for name, t, dims, wanted in (("bias", bias, "[D]", full[-1:]), ("z", z, "[B, T, D]", full)):
        if t is not None:
            checks.shape(name, checks.tensor(name, t, x), dims, tuple(wanted))
            checks.dtype(name, t, x.dtype, _compute_dtype(x))


def _step(x: Tensor, dt: Tensor, bias: Tensor | None, softplus: bool) -> Tensor:
    """Compute Δ [B, T, D] in the dtype of sums."""
    with checks.no_autocast(x):
        step = dt.to(_compute_dtype(x))
        step = step if bias is None else step + bias.to(step.dtype)
        return F.softplus(step) if softplus else step


class _Call(NamedTuple):
    """The tensors of a call, in the order of the operators."""

    x: Tensor
    dt: Tensor
    a: Tensor
    b: Tensor
    c: Tensor
    d: Tensor | None
    initial: Tensor | None
    cu_seqlens: Tensor | None

    def run(self, backend: str) -> tuple[Tensor, Tensor]:
        """Compute outputs and last states by the backend that ``backend`` selects."""
        name = dispatch.choose(backend, self.refusal)
        if name in KERNELS:
            y, last, _ = KERNELS[name](*self)
            return y, last
        with checks.no_autocast(self.x):
            return self._portable(name)

    def _portable(self, name: str) -> tuple[Tensor, Tensor]:
        if name == "reference":
            from linattn.ops.reference.selective_scan import selective_scan as definition

            return portable.whole(definition, *self)
        return portable.whole(portable.selective_scan, *self)

    def refusal(self, name: str, asked: bool) -> str | None:
        """Reason why the backend ``name`` does not run the call, or None if it does; ``asked``: the caller named the backend."""
        return dispatch.refusal(name, asked, self.x, KERNELS.__getitem__, self, defined=True)


def _explained(*, bias: Tensor | None, softplus: bool, z: Tensor | None, **given: Any) -> dispatch.Explained:
    checks.flag("softplus", softplus)
    inside = bias is not None or softplus
    call = _Call(*(given[name] for name in ("x", "dt", "A", "B", "C", "D", "initial_state", "cu_seqlens")))
    _check(call, positive=inside)
    x, A = call.x, call.a
    _check_gated(x, bias, z)
    if inside:
        call = call._replace(dt=_step(x, call.dt, bias, softplus))
        _check(call)
    title = f"selective_scan on {x.device}, {x.dtype}, x {list(x.shape)}, A {list(A.shape)}"
    return dispatch.Explained(title, x.device, call.refusal, ())


dispatch.explains(selective_scan, _explained)


def _check(call: _Call, positive: bool = False) -> None:
    """Raise ValueError or TypeError unless the arguments fit; ``positive``: the time steps are positive whatever ``dt`` is."""
    x, dt, a, b, c, d, initial, cu = call
    if checks.tensor("x", x).ndim != 3:
        raise ValueError(f"x must have shape [B, T, D], but came with {list(x.shape)}")
    checks.dtype("x", x, *checks.DTYPES)
    compute_dtype = _compute_dtype(x)
    batch, tokens, width = x.shape
    size = a.shape[-1] if checks.tensor("A", a, x).ndim == 2 else 0
    wanted = [("dt", dt, "[B, T, D]", (batch, tokens, width)), ("A", a, "[D, N]", (width, size))]
    wanted += [(name, t, "[B, T, N]", (batch, tokens, size)) for name, t in (("B", b), ("C", c))]
    if d is not None:
        wanted.append(("D", d, "[D]", (width,)))
    for name, t, dims, full in wanted:
        checks.shape(name, checks.tensor(name, t, x), dims, full)
        checks.dtype(name, t, x.dtype, compute_dtype)
    checks.not_positive("A", a)
    if not positive and dt.numel() and checks.values_visible(dt) and bool(dt.amin() < 0):
        raise ValueError(f"dt is a time step and must be >= 0, but its smallest value is {dt.min().item():g}")
    if cu is not None:
        checks.packed_lengths(cu, x)
    if initial is not None:
        checks.shape("initial_state", checks.tensor("initial_state", initial, x), "[rows, D, N]", (_rows(x, cu), width, size))
        checks.dtype("initial_state", initial, compute_dtype)


def _cpu() -> ModuleType:
    from linattn.ops.cpu import selective_scan as native

    return native


def _triton() -> ModuleType:
    from linattn.ops.triton import selective_scan as kernels

    return kernels


_INPUTS = "Tensor x, Tensor dt, Tensor a, Tensor b, Tensor c, Tensor? d"
_SEVEN = "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
_SHARED: dict[str, Any] = {
    "results": "y last kept", "gradients": "x dt a b c d initial", "like": "x", "save_flag": True,
    "once": 'the kernels of the selective scan have no gradients of gradients: ask for backend="torch"',
}  # fmt: skip
KERNELS = {
    "triton": Operator(
        _triton,
        Pass(f"({_INPUTS}, Tensor? initial, Tensor? cu_seqlens, bool keep) -> (Tensor, Tensor, Tensor)", "selective_scan_forward"),
        Pass(
            f"({_INPUTS}, Tensor? initial, Tensor? cu_seqlens, Tensor kept, Tensor d_y, Tensor? d_last) -> {_SEVEN}",
            "selective_scan_backward",
        ),
        **_SHARED,
    ),
    "cpu": Operator(
        _cpu,
        Pass(f"({_INPUTS}, Tensor? initial, Tensor? cu_seqlens, bool keeps) -> (Tensor, Tensor, Tensor)", "selective_scan_cpu"),
        Pass(f"(Tensor dy, Tensor? dlast, {_INPUTS}, Tensor? cu_seqlens, Tensor kept) -> {_SEVEN}", "selective_scan_cpu_backward"),
        key="CPU",
        **_SHARED,
    ),
}


def _rows(x: Tensor, cu_seqlens: Tensor | None) -> int:
    return x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1


def _compute_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32
