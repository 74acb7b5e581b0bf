"""Public function of the recurrence: checks the arguments, chooses a backend, divides by the normaliser."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, TypedDict, Unpack, get_args, overload

import torch
from torch import Tensor

from linattn.ops import checks, dispatch, recurrence, sharding
from linattn.ops.inputs import Backend, Form, Given, Inputs, Outputs

_Pair = tuple[Tensor, Tensor]
FORMS: tuple[str, ...] = get_args(Form)


class _Options(TypedDict, total=False):
    """Keywords that do not affect the return type."""

    decay: Tensor | None
    beta: Tensor | None
    erase: _Pair | None
    bonus: Tensor | None
    scale: float | None
    causal: bool
    initial_state: Tensor | _Pair | None
    cu_seqlens: Tensor | None
    form: Form
    backend: Backend


@overload
def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, *, normalize: Literal["return"], return_state: Literal[False] = False, **options: Unpack[_Options]
) -> _Pair: ...
@overload
def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, *, normalize: Literal["return"], return_state: Literal[True], **options: Unpack[_Options]
) -> tuple[_Pair, _Pair]: ...
@overload
def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, *, normalize: float = False, return_state: Literal[False] = False, **options: Unpack[_Options]
) -> Tensor: ...
@overload
def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, *, normalize: Literal[False] = False, return_state: Literal[True], **options: Unpack[_Options]
) -> _Pair: ...
@overload
def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, *, normalize: Literal[True], return_state: Literal[True], **options: Unpack[_Options]
) -> tuple[Tensor, _Pair]: ...
@overload
def linear_attention(  # precedes float, which also admits bool
    q: Tensor, k: Tensor, v: Tensor, *, normalize: bool, return_state: bool, **options: Unpack[_Options]
) -> Any: ...
@overload
def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, *, normalize: float, return_state: Literal[True], **options: Unpack[_Options]
) -> tuple[Tensor, _Pair]: ...
@overload
def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, *, normalize: float | str = False, return_state: bool = False, **options: Unpack[_Options]
) -> Any: ...


@sharding.shards
def linear_attention(  # noqa: PLR0913  public
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    decay: Tensor | None = None,
    beta: Tensor | None = None,
    erase: tuple[Tensor, Tensor] | None = None,
    bonus: Tensor | None = None,
    normalize: bool | float | str = False,
    scale: float | None = None,
    causal: bool = True,
    initial_state: Tensor | tuple[Tensor, Tensor] | None = None,
    return_state: bool = False,
    cu_seqlens: Tensor | None = None,
    form: Form = "auto",
    backend: Backend = "auto",
) -> Any:
    r"""Compute linear attention in its general recurrent form, exactly for any decay.

    ``S_t = Diag(α_t) S_{t-1} + w_t (r_tᵀ S_{t-1}) + k_tᵀ v_t`` and ``o_t = scale · q_t S_t``, with every term optional.

    Args:
        q, k: queries and keys [B, T, Hk, K]. Head ``h`` of ``v`` reads head ``h // (H / Hk)``.
        v: values [B, T, H, V]. q, k and v have one dtype: float64, float32, bfloat16 or float16.
        decay: natural logarithm of α, at most 0; -inf resets a finite state (0 times a NaN or an infinity is NaN, so
            these persist until their sequence ends in ``cu_seqlens``). [H] or [H, K] constant, [B, T, H] per head,
            [B, T, H, K] per channel. Like ``beta``, ``erase`` and ``bonus`` in the dtype of q or in float32.
        beta: [B, T, H], the delta rule on the decayed state ``D = Diag(α) S_{t-1}``:
            ``S_t = D + β k_tᵀ (v_t − k_t D)`` (arXiv 2406.06484, 2412.06464).
        erase: ``(read, write)``, each [B, T, H, K]: ``S_t = Diag(α) S_{t-1} + writeᵀ (read S_{t-1}) + k_tᵀ v_t``
            (RWKV-7, arXiv 2503.14456). The read sees the state before its decay.
        bonus: u [H, K]: ``o_t = q_t (S_{t-1} + Diag(u) k_tᵀ v_t)``, read before decay and write (RWKV-5/6, arXiv 2404.05892).
        normalize: divide by ``q_t z_t + eps``, where q is scaled and z is the decayed sum of k. True: eps 1e-6; a float
            (0.0 too): that eps; ``"return"``: give ``(o, q_t z_t)`` undivided, the second [B, T, H] in the dtype of the states.
        scale: factor of q; K ** -0.5 if None.
        causal: False: every query reads the same total; q may then have another length (cross attention).
        initial_state: S [N, H, K, V] in float32 (float64 for float64); with ``normalize`` the pair (S, z), z [N, H, K].
        return_state: return ``(o, S)``, with ``normalize`` ``(o, (S, z))``.
        cu_seqlens: [N + 1] integers: B is 1 and N sequences, empty ones allowed, lie end to end, isolated from each other.
        form: ``"parallel"`` (quadratic), ``"chunk"``, ``"recurrent"``, or ``"auto"``. They give the same numbers.
        backend: ``"reference"`` (the definition), ``"torch"`` (every device), ``"cpu"`` (native, in float32; differentiable once),
            ``"triton"`` (NVIDIA GPUs from Ampere on; float32 is multiplied in three tf32 parts, as is float16 with ``beta`` or
            ``erase``, else in tf32; differentiable once), or ``"auto"``; see :func:`linattn.explain`.

    Returns:
        ``o`` [B, T, H, V] in the dtype of v (with ``normalize="return"`` the pair), and the state if asked for.

    Raises:
        ValueError: for invalid shapes, dtypes, devices and values, and for arguments that exclude each other.
    """
    given = Given(q, k, v, decay, beta, erase, bonus, normalize, scale, causal, initial_state, return_state, cu_seqlens)
    inputs, mode = checks.call(given)
    checks.choice("form", form, FORMS)
    run = _runs(dispatch.choose(backend, refusal, inputs, form), inputs, form)
    return _results(run, inputs, mode)


def part_of_rows(group: sharding.Group, form: str = "auto", backend: str = "auto", **given: Any) -> Any:
    """Compute :func:`linear_attention` on this process's part of rows that are split over the processes of ``group``.

    The initial and the final state are those of the whole rows; with ``cu_seqlens``, the sequences of this part, neither may be asked for.
    Returns None, in every process alike, if no kernels exchange states: the call is not for a GPU, or does not run in chunks. Each process
    must have a token.
    """
    inputs, mode = checks.call(Given(**given))
    if backend not in ("auto", "triton") or form not in ("auto", "chunk"):
        return None
    if refusal("triton", backend == "triton", inputs, "chunk") is not None:
        return None
    from linattn.ops.triton import fitting
    from linattn.ops.triton import linear_attention as kernels

    try:
        return _results(partial(kernels.chunked, group=group), inputs, mode)
    except fitting.Unfit:
        return None


def _results(run: Callable[[Inputs], Outputs], inputs: Inputs, mode: float | str | None) -> Any:
    dtype = inputs.v.dtype
    with checks.no_autocast(inputs.v):
        out = run(inputs)
        o = _divided(out, mode, dtype)
    if not inputs.return_state:
        return o
    return o, (out.state if mode is None else (out.state, out.z))


def _divided(out: Outputs, mode: float | str | None, dtype: torch.dtype) -> Tensor | _Pair:
    if mode is None or out.denominator is None:
        return out.o.to(dtype)
    if isinstance(mode, str):
        return out.o.to(dtype), out.denominator
    return (out.o / (out.denominator + mode)[..., None]).to(dtype)


def refusal(name: str, asked: bool, inputs: Inputs, form: str) -> str | None:
    """Reason why the backend ``name`` does not run ``inputs``, or None if it does; ``asked``: the caller named the backend."""
    if name == "cpu":
        return recurrence.WALK.refusal(inputs, form)
    if name == "triton":
        if (reason := dispatch.device_refusal(inputs.v, asked)) is not None:
            return reason
        from linattn.ops.triton import linear_attention as kernels

        return kernels.refusal(inputs, form)
    if name == "reference":
        if form not in ("auto", "recurrent"):
            return f"it is the token by token definition and has no form {form!r}"
        return dispatch.definition_refusal(asked)
    if inputs.v.device.type == "mps" and inputs.compute_dtype.itemsize == 8:
        return "MPS has no float64"
    return None


def form_of(name: str, inputs: Inputs, form: str) -> str:
    """Form that the backend ``name`` takes. ``auto`` in the portable backend: recurrent for one token, chunks for more."""
    if name == "triton":
        from linattn.ops.triton import linear_attention as kernels

        return kernels.form_of(inputs, form)
    if name != "torch":
        return "recurrent"
    if form != "auto":
        return form
    return "recurrent" if inputs.causal and inputs.k.shape[1] == 1 and inputs.cu_seqlens is None else "chunk"


def _runs(name: str, inputs: Inputs, form: str) -> Callable[[Inputs], Outputs]:
    """Function of the backend ``name`` that runs ``inputs``."""
    if name in ("cpu", "triton") and recurrence.recorded(inputs) and form_of(name, inputs, form) == "recurrent":
        return recurrence.step
    if name == "triton":
        from linattn.ops.triton import linear_attention as kernels

        return kernels.FORMS[form_of(name, inputs, form)]
    if name == "cpu":
        return recurrence.walk
    if name == "reference":
        from linattn.ops.reference.linear_attention import linear_attention as run

        return run
    from linattn.ops.torch import linear_attention as portable

    return portable.FORMS[form_of(name, inputs, form)]


def _off(inputs: Inputs, form: str) -> list[str]:
    from linattn.ops.triton import linear_attention as kernels

    return kernels.off(inputs, form)


def _explained(form: str, backend: str, **given: Any) -> dispatch.Explained:  # noqa: ARG001  every op's has a backend
    inputs, _ = checks.call(Given(**given))
    checks.choice("form", form, FORMS)
    q, v = inputs.q, inputs.v
    title = f"linear_attention on {v.device}, {v.dtype}, q {list(q.shape)}, v {list(v.shape)}"
    return dispatch.Explained(title, v.device, refusal, (inputs, form), form_of, _off)


dispatch.explains(linear_attention, _explained)
