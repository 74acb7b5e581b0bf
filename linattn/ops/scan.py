"""Public functions of the elementwise recurrences: decayed sum and decayed maximum."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, Literal, NamedTuple, TypedDict, Unpack, overload

import torch
from torch import Tensor

from linattn.ops import checks, dispatch, sharding
from linattn.ops.dispatch import Explained
from linattn.ops.inputs import Backend
from linattn.ops.operator import EVERYWHERE, Operator, Pass
from linattn.ops.torch import scan as portable


class _Options(TypedDict, total=False):
    """Keywords that do not affect the return type."""

    initial_state: Tensor | None
    cu_seqlens: Tensor | None
    backend: Backend


@overload
def diagonal_scan(decay: Tensor, b: Tensor, *, return_state: Literal[False] = False, **options: Unpack[_Options]) -> Tensor: ...
@overload
def diagonal_scan(decay: Tensor, b: Tensor, *, return_state: Literal[True], **options: Unpack[_Options]) -> tuple[Tensor, Tensor]: ...
@overload
def diagonal_scan(decay: Tensor, b: Tensor, *, return_state: bool, **options: Unpack[_Options]) -> Any: ...
@sharding.shards
def diagonal_scan(
    decay: Tensor,
    b: Tensor,
    *,
    initial_state: Tensor | None = None,
    return_state: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute ``h_t = exp(decay_t) h_{t-1} + b_t`` elementwise (HGRN, minGRU, S4D, S5, LRU, RG-LRU).

    Args:
        decay: natural logarithm, [B, T, D] or constant [D]; float32 or float64 and at most 0, or complex with a real part
            of at most 0. -inf resets a finite state; a NaN or an infinity only ends with its sequence in ``cu_seqlens``.
        b: [B, T, D], in any floating dtype, complex only beside a complex decay. After an infinity the states of its channel
            and sequence are infinite in the reference, while decays are finite, but NaN in the other backends, which weight a state
            by 1 and by exp(decay) - 1.
        initial_state: [N, D] in the dtype of sums: float32 (float64 if decay or b is), or its complex kind.
        return_state: also return the last state of each sequence [N, D].
        cu_seqlens: [N + 1] integers: B is 1 and N sequences lie end to end.
        backend: ``"reference"`` (token by token), ``"torch"`` (every device), ``"triton"`` and ``"cpu"`` (kernels of a GPU and of a
            CPU: real decays and float32 states, no gradients of gradients), or ``"auto"``: the kernels where they run the call, else
            torch. ``linattn.explain(linattn.diagonal_scan, ...)`` says which and why.

    Returns:
        h [B, T, D] in the dtype of b, complex if decay is; and the state if asked for.

    Raises:
        ValueError: naming the argument, what came and what was wanted.
    """
    call = _sum(decay, b, initial_state, cu_seqlens)
    checks.flag("return_state", return_state)
    h, last = call.run(backend)
    h = h if call.wide.is_complex else h.to(b.dtype)
    return (h, last) if return_state else h


@overload
def running_max(decay: Tensor, gate: Tensor, *, return_state: Literal[False] = False, **options: Unpack[_Options]) -> Tensor: ...
@overload
def running_max(decay: Tensor, gate: Tensor, *, return_state: Literal[True], **options: Unpack[_Options]) -> tuple[Tensor, Tensor]: ...
@overload
def running_max(decay: Tensor, gate: Tensor, *, return_state: bool, **options: Unpack[_Options]) -> Any: ...
@sharding.shards
def running_max(
    decay: Tensor,
    gate: Tensor,
    *,
    initial_state: Tensor | None = None,
    return_state: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute ``m_t = max(decay_t + m_{t-1}, gate_t)`` elementwise: the stabiliser of exponential gates (mLSTM, RWKV-4).

    With it ``exp(gate_t - m_t)`` and ``exp(decay_t + m_{t-1} - m_t)`` are at most 1, so a sum with exponential weights is
    kept exactly by a recurrence whose decays are at most 0.

    Args:
        decay: natural logarithm of at most 0, [B, T, D] or constant [D].
        gate: [B, T, D].
        initial_state: m_0 [N, D], float32 (float64 if decay or gate is); -inf if None.
        return_state, cu_seqlens, backend: as in :func:`diagonal_scan`.

    Returns:
        m [B, T, D] in the dtype of the state; and the last m of each sequence [N, D] if asked for.

    Raises:
        ValueError: naming the argument, what came and what was wanted.
    """
    checks.flag("return_state", return_state)
    m, last = _maximum(decay, gate, initial_state, cu_seqlens).run(backend)
    return (m, last) if return_state else m


class _Call(NamedTuple):
    """Checked call: ``kind`` is ``"sum"`` or ``"maximum"``, ``wide`` the dtype of its states."""

    kind: str
    decay: Tensor
    x: Tensor
    initial: Tensor | None
    cu_seqlens: Tensor | None
    wide: torch.dtype

    def run(self, backend: str) -> tuple[Tensor, Tensor]:
        """Compute every state and the last ones by the backend that ``backend`` selects."""
        name = dispatch.choose(backend, self.refusal)
        if name in KERNELS:
            results: tuple[Tensor, Tensor] = KERNELS[name](*self[:5])
            return results
        join, scan = _operation(self.kind, name)
        with checks.no_autocast(self.x):
            return portable.whole(scan, join, *self[1:5], 0.0 if self.kind == "sum" else -torch.inf)

    def refusal(self, name: str, asked: bool) -> str | None:
        """Reason why the backend ``name`` does not run the call, or None if it does; ``asked``: the caller named the backend."""
        if name in KERNELS and self.wide != torch.float32:
            return f"its states are float32, but those of this call are {self.wide}"
        return dispatch.refusal(name, asked, self.x, KERNELS.__getitem__, self[:5], defined=True)


def _sum(decay: Tensor, b: Tensor, initial: Tensor | None, cu: Tensor | None) -> _Call:
    complex_ = checks.tensor("decay", decay).is_complex()
    if not (complex_ or decay.dtype in checks.DTYPES):
        raise ValueError(f"decay must be floating point or complex, but came as {decay.dtype}")
    if checks.tensor("b", b).is_complex() and not complex_:
        raise ValueError(f"decay must be complex because b is {b.dtype}, but came as {decay.dtype}")
    if not (b.dtype in checks.DTYPES or b.is_complex()):
        raise ValueError(f"b must be floating point or complex, but came as {b.dtype}")
    return _checked("sum", decay, "b", b, initial, cu)


def _maximum(decay: Tensor, gate: Tensor, initial: Tensor | None, cu: Tensor | None) -> _Call:
    for name, t in (("decay", decay), ("gate", gate)):
        if checks.tensor(name, t).dtype not in checks.DTYPES:
            raise ValueError(f"{name} must be floating point, but came as {t.dtype}")
    return _checked("maximum", decay, "gate", gate, initial, cu)


def _checked(kind: str, decay: Tensor, name: str, x: Tensor, initial: Tensor | None, cu: Tensor | None) -> _Call:
    if x.ndim != 3:
        raise ValueError(f"{name} must have shape [B, T, D], but came with {list(x.shape)}")
    checks.tensor("decay", decay, x)
    checks.shape("decay", decay, "[B, T, D] or [D]", tuple(x.shape), (x.shape[-1],))
    checks.not_positive("decay", decay.real if decay.is_complex() else decay)
    if cu is not None:
        checks.packed_lengths(cu, x)
    rows, wide = (
        x.shape[0] if cu is None else cu.shape[0] - 1,
        torch.promote_types(torch.promote_types(decay.dtype, x.dtype), torch.float32),
    )
    if initial is not None:
        checks.shape("initial_state", checks.tensor("initial_state", initial, x), "[N, D]", (rows, x.shape[-1]))
        checks.dtype("initial_state", initial, wide)
    return _Call(kind, decay, x, initial, cu, wide)


def _cpu() -> ModuleType:
    from linattn.ops.cpu import scan

    return scan


def _triton() -> ModuleType:
    from linattn.ops.triton import scan

    return scan


def _saved(inputs: Sequence[Any], output: tuple[Tensor, Tensor]) -> Sequence[Any]:
    """Inputs with x replaced by the states if they are sums, whose gradients do not need x."""
    return (*inputs[:2], output[0], *inputs[3:]) if inputs[0] == "sum" else inputs


def _operator(load: Callable[[], ModuleType], key: str, forward: str, backward: str, last: str) -> Operator:
    return Operator(
        load,
        Pass("(str kind, Tensor decay, Tensor x, Tensor? initial, Tensor? cu_seqlens) -> (Tensor, Tensor)", forward),
        Pass(
            "(str kind, Tensor decay, Tensor x, Tensor out, Tensor? initial, Tensor? cu_seqlens, Tensor d_out, "
            f"Tensor? d_{last}, bool of_decay) -> (Tensor, Tensor, Tensor)", backward,
        ),
        f"out {last}", "decay x initial", "out", key, saves=_saved,
        once='the kernels of the scans have no gradients of gradients: ask for backend="torch"',
    )  # fmt: skip


KERNELS = {
    "triton": _operator(_triton, EVERYWHERE, "elementwise_forward", "elementwise_backward", "final"),
    "cpu": _operator(_cpu, "CPU", "scan_cpu", "scan_cpu_backward", "last"),
}


def _operation(kind: str, backend: str) -> tuple[Callable, Callable]:
    if backend == "reference":
        from linattn.ops.reference import scan as reference

        return (reference.decayed_sum if kind == "sum" else reference.decayed_max), reference.scan
    return (portable.decayed_sum if kind == "sum" else portable.decayed_max), portable.scan


def _explained(op: Callable[..., Any], checked: Callable[..., _Call]) -> Callable[..., Explained]:
    def explained(initial_state: Tensor | None, return_state: bool, cu_seqlens: Tensor | None, backend: str, **two: Tensor) -> Explained:  # noqa: ARG001
        call = checked(*two.values(), initial_state, cu_seqlens)
        return dispatch.explained(op, call.x, call.refusal)

    return explained


dispatch.explains(diagonal_scan, _explained(diagonal_scan, _sum))
dispatch.explains(running_max, _explained(running_max, _maximum))
