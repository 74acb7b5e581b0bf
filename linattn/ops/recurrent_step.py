"""Decoding step of the recurrence for a few tokens, which updates its state in place."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from linattn.ops import checks, dispatch, sharding, tracing
from linattn.ops.cpu import library
from linattn.ops.inputs import Backend, Flat, Given
from linattn.ops.linear_attention import linear_attention
from linattn.ops.norms import unit_length


@sharding.refuses("decoding needs the state of the whole sequence in one process")
def recurrent_step_(
    state: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    decay: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    unit: float | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Run :func:`linattn.linear_attention` from ``state`` [B, H, K, V], and overwrite it with the final state.

    Args:
        state: contiguous, float32 (float64 for float64).
        q, k, v, decay, beta, scale, backend: as there; the values of ``decay`` are not checked.
        unit: an eps; q and k are first divided by √(Σ x² + eps).

    Returns:
        o [B, T, H, V].

    Raises:
        ValueError: naming the argument, what came and what was wanted.
    """
    tensors = (state, q, k, v, decay, beta)
    unseen = not (tracing.wanted(*tensors) or tracing.traced(*tensors))
    name = dispatch.choose(backend if unseen else "torch", _refusal, tensors)
    if name in ("reference", "torch"):
        q, k = (q, k) if unit is None else (unit_length(t, eps=unit, dtype=v.dtype) for t in (q, k))
        o, last = linear_attention(
            q, k, v, decay=decay, beta=beta, scale=scale, initial_state=state, return_state=True, backend=backend
        )  # fmt: skip
        state.copy_(last)
        return o
    if not _fits(*tensors):
        checks.call(Given(q, k, v, decay, beta, scale=scale, initial_state=state))  # raises with the reason
    call: Any = (q, k, v, decay, beta, None, None, None, state, None, None, k.shape[-1] ** -0.5 if scale is None else scale, False)
    if name == "triton":
        from linattn.ops.triton import decode

        return decode.step_(Flat(*call).inputs(), unit=unit).o
    from linattn.ops.cpu import linear_attention as native

    if unit is not None:  # both in one call, because launching dominates
        call = (*unit_length(torch.cat([q, k], 2), eps=unit, dtype=v.dtype).chunk(2, 2), *call[2:])
    o, _, run = native.bound_step(*call)
    run()
    return o


def _refusal(name: str, asked: bool, tensors: tuple[Tensor | None, ...]) -> str | None:
    """Reason why no kernel runs the step in place, or None; the public recurrence, used otherwise, may still choose a kernel."""
    if name in ("torch", "reference"):
        return None
    state = tensors[0]
    assert state is not None
    if name == "triton" and (reason := dispatch.gpu_refusal(state, asked)) is not None:
        return reason
    if state.dtype != torch.float32 or not state.is_contiguous() or state.is_neg() or state.numel() == 0:
        return "it updates contiguous float32 states only"
    if name == "cpu":
        return library.refusal(*tensors)
    from linattn.ops.triton import decode

    return None if state.shape[2] <= decode.LARGEST else f"it takes keys of at most {decode.LARGEST} channels, not {state.shape[2]}"


def _fits(state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, beta: Tensor | None) -> bool:
    """True if the arguments of a step pass the checks of :func:`linattn.ops.checks.call`, in a few comparisons."""
    if q.ndim != 4 or v.ndim != 4 or v.shape[1] == 0 or not q.dtype == k.dtype == v.dtype:
        return False
    batch, tokens, heads, size = q.shape
    if any(t is not None and t.device != state.device for t in (q, k, v, decay, beta)):
        return False
    per_head = (batch, tokens, v.shape[2])
    if k.shape != q.shape or v.shape[:2] != per_head[:2] or not heads or v.shape[2] % heads:
        return False
    wide = (v.dtype, torch.float32)
    if state.shape != (batch, v.shape[2], size, v.shape[3]) or (beta is not None and (beta.shape != per_head or beta.dtype not in wide)):
        return False
    return decay is None or (decay.shape in (per_head, (*per_head, size)) and decay.dtype in wide)


def _explained(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, beta: Tensor | None, scale: float | None, **_: Any
) -> dispatch.Explained:  # fmt: skip
    checks.call(Given(q, k, v, decay, beta, scale=scale, initial_state=state))
    title = f"recurrent_step_ on {state.device}, {v.dtype}, state {list(state.shape)}"
    return dispatch.Explained(title, state.device, _refusal, ((state, q, k, v, decay, beta),))


dispatch.explains(recurrent_step_, _explained)
