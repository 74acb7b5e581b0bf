"""Recurrent form in one kernel: a few tokens from a given state, for every rule and every decay.

    read        o_t = q_t S_t, with a bonus   o_t = q_t S_{t-1} + (q_t · u ⊙ k_t) v_t
    write       S_t = D + k_tᵀ v_t            D = Diag(α_t) S_{t-1}
    delta       S_t = D + k_tᵀ β_t (v_t − k_t D)
    erase       S_t = D + w_tᵀ (r_t S_{t-1}) + k_tᵀ v_t

The cost of a step is that of reading and writing the state once. A program owns all K rows of BV columns of one state: products with
the state are sums over K, so columns are independent, and delta and erase, which read before they write, need no other program. With
one warp per program such a sum is a few shuffles between lanes without a barrier, and the loads of the whole tile are in flight at
once. Many small programs occupy the device better than a few large ones.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from linattn.ops import gpu, tracing
from linattn.ops.inputs import Flat, Inputs, Outputs
from linattn.ops.operator import register
from linattn.ops.torch import linear_attention as portable
from linattn.ops.triton import fitting, launch, table

LARGEST = 512  # largest key size, whose tile must fit into registers
SUMMED = 256  # numbers of a warp's tile from which on each lane adds several products itself before sums over lanes


@triton.jit
def _factor(log):
    """exp(log) as keep + rest, with keep 1 or 0. A factor near 1 would be rounded in the same direction at every step, so that slow
    decays drift; its distance from 1, computed by a series, is precise.
    """
    near = log > -0.5
    x = tl.where(near, log, 0.0)
    series = 1.0 + x * (1.0 / 8)
    for n in tl.static_range(7, 1, -1):
        series = 1.0 + x * (1.0 / n) * series
    return tl.where(near, 1.0, 0.0), tl.where(near, x * series, tl.exp(log))


@triton.jit
def _fade(s, keep, rest, written):
    """exp(log) s + written in two steps, the smaller summand first. After a reset s is masked, which also drops infinities."""
    s = tl.where(keep + rest > 0.0, s, 0.0)
    return keep * s + (rest * s + written)


@triton.jit
def _own_state(H: tl.constexpr, V: tl.constexpr, BV: tl.constexpr):
    """Block of columns of this program, and the index of its state, the state's head and its row."""
    blocks: tl.constexpr = (V + BV - 1) // BV
    program = tl.program_id(0)
    state = (program // blocks).to(tl.int64)
    return program % blocks, state, state % H, state // H


@triton.jit
def _own_tile(block, state, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):
    """Channels and columns of a block of a state [K, V], masks of those that exist, and offsets and mask of their tile."""
    channels = tl.arange(0, BK)
    columns = block * BV + tl.arange(0, BV)
    in_k = channels < K
    in_v = columns < V
    return channels, columns, in_k, in_v, state * K * V + channels[:, None] * V + columns[None, :], in_k[:, None] & in_v[None, :]


@triton.jit(do_not_specialize=["tokens", "decay_token", "decay_head", "beta_token", "beta_head"])
def recurrence(
    q, k, v, decay, beta, read, write, bonus, initial, initial_z, cu, o, denominator, final, final_z,
    q_token, q_head, k_token, k_head, v_token, v_head, decay_token, decay_head, beta_token, beta_head,
    read_token, read_head, write_token, write_head,
    tokens, scale, eps,
    H: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    PER_CHANNEL: tl.constexpr, UNIT: tl.constexpr, OVERLAPPED: tl.constexpr,
):  # fmt: skip
    """Run the recurrence for one block of columns of one state; arguments may be None. Token t of row n is at n · tokens + t.

    UNIT: q and k are first divided by √(Σ x² + eps).
    OVERLAPPED: the states are read while the previous launch may still run, and the next launch may start at once.
    """
    if OVERLAPPED:
        tl.extra.cuda.gdc_launch_dependents()
    block, state, head, n = _own_state(H, V, BV)
    channels, columns, in_k, in_v, tile, inside = _own_tile(block, state, K, V, BK, BV)
    if initial is not None:
        s = tl.load(initial + tile, mask=inside, other=0.0)
    else:
        s = tl.zeros([BK, BV], tl.float32)
    if denominator is not None:
        own_z = in_k & (block == 0)  # one program per state reads and writes z, which may be updated in place
        z = tl.zeros([BK], tl.float32)
        if initial_z is not None:
            z = tl.load(initial_z + state * K + channels, mask=own_z, other=0.0)
    if bonus is not None:
        u = tl.load(bonus + head * K + channels, mask=in_k, other=0.0)
    if cu is not None:
        first = tl.load(cu + n).to(tl.int64)
        last = tl.load(cu + n + 1).to(tl.int64)
    else:
        first = n * tokens
        last = first + tokens

    if OVERLAPPED:
        tl.extra.cuda.gdc_wait()
    shared = head // GROUP
    token = first
    while token < last:
        # All loads come before the first use: the layout conversion of a vector needs a barrier, which loads would wait for.
        qt = tl.load(q + token * q_token + shared * q_head + channels, mask=in_k, other=0.0)
        kt = tl.load(k + token * k_token + shared * k_head + channels, mask=in_k, other=0.0)
        vt = tl.load(v + token * v_token + head * v_head + columns, mask=in_v, other=0.0)
        if decay is not None:
            place = decay + token * decay_token + head * decay_head
            log = tl.load(place + channels, mask=in_k, other=0.0) if PER_CHANNEL else tl.load(place)
        if beta is not None:
            bt = tl.load(beta + token * beta_token + head * beta_head).to(tl.float32)
        if read is not None:
            rt = tl.load(read + token * read_token + head * read_head + channels, mask=in_k, other=0.0)
            wt = tl.load(write + token * write_token + head * write_head + channels, mask=in_k, other=0.0)
        qt = qt.to(tl.float32)
        kt = kt.to(tl.float32)
        if UNIT:
            qt = qt / tl.sqrt_rn(tl.sum(qt * qt, 0) + eps)
            kt = kt / tl.sqrt_rn(tl.sum(kt * kt, 0) + eps)
        qt = qt * scale
        vt = vt.to(tl.float32)
        if read is not None:
            x = tl.sum(rt.to(tl.float32)[:, None] * s, 0)
        if bonus is not None:
            out = tl.sum(qt[:, None] * s, 0) + tl.sum(qt * kt * u, 0) * vt
        if decay is not None:
            keep_z, rest_z = _factor(log.to(tl.float32))
            keep, rest = (keep_z[:, None], rest_z[:, None]) if PER_CHANNEL else (keep_z, rest_z)
        if beta is not None:
            faded = s if decay is None else _fade(s, keep, rest, 0.0)
            vt = bt * (vt - tl.sum(kt[:, None] * faded, 0))
        written = kt[:, None] * vt[None, :]
        if read is not None:
            written += wt.to(tl.float32)[:, None] * x[None, :]
        s = s + written if decay is None else _fade(s, keep, rest, written)
        if bonus is None:
            out = tl.sum(qt[:, None] * s, 0)
        tl.store(o + (token * H + head) * V + columns, out, mask=in_v)
        if denominator is not None:
            z = z + kt if decay is None else _fade(z, keep_z, rest_z, kt)
            tl.store(denominator + token * H + head, tl.sum(qt * z, 0), mask=block == 0)
        token += 1

    if final is not None:
        tl.store(final + tile, s, mask=inside)
        if denominator is not None:
            tl.store(final_z + state * K + channels, z, mask=own_z)


def _walkable(x: Tensor | None, vector: bool = True) -> Tensor | None:
    """``x`` [B, T, H] and, for a ``vector``, a dense last dimension, with one stride between tokens across the whole batch."""
    if x is None:
        return None
    dense = not vector or x.stride(-1) == 1
    if dense and (x.ndim <= 1 + vector or x.shape[1] == 1 or x.shape[0] <= 1 or x.stride(0) == x.shape[1] * x.stride(1)):
        return x
    return x.contiguous()


def _steps(x: Tensor | None, vector: bool = True) -> tuple[int, int]:
    """Strides over the tokens of the batch and over heads; those of a constant, [H] or [H, K], are 0 over tokens."""
    if x is None:
        return 0, 0
    if x.ndim == 1 + vector:
        return 0, x.stride(0)
    return x.stride(0 if x.shape[1] == 1 else 1), x.stride(2)


def _power_of_two(n: int) -> int:
    """Smallest power of two that is at least ``n``; triton's function takes a microsecond."""
    return 1 << (n - 1).bit_length()


def tile(K: int, V: int, states: int) -> tuple[int, int, int]:
    """Rows and columns of a program's tile, and its warps."""
    columns, numbers = table.decode(states * V)
    if V % 4:  # rows are no multiples of 16 bytes: single columns per thread
        numbers = 16
    BK, BV = _power_of_two(K), min(columns, _power_of_two(V))
    return BK, BV, max(1, BK * BV // (32 * numbers))


def _name(arguments: tuple[Any, ...], *_: object) -> Hashable:
    """Key of a call in the record of kernels that do not fit; calls that differ only in batch and length share it."""
    k, v, decay, beta, read, _, bonus = arguments[1:8]
    rank = None if decay is None else decay.ndim in (2, 4)
    return "recurrent", v.device, v.dtype, k.shape[3], v.shape[3], rank, beta is None, read is None, bonus is None


def _portable(
    arguments: tuple[Any, ...], final: Tensor | None, final_z: Tensor | None, _: bool = False, unit: float | None = None
) -> tuple[Tensor, Tensor | None]:
    """:func:`_launch` in operations of torch."""
    x = Flat(*arguments)
    if unit is not None:
        q, k = ((t.float() * (t.float().square().sum(-1, keepdim=True) + unit).rsqrt()).to(x.v.dtype) for t in (x.q, x.k))
        x = x._replace(q=q, k=k)
    out = portable.FORMS["recurrent"](x.inputs())
    for to, t in ((final, out.state), (final_z, out.z)):
        if to is not None and t is not None:
            to.copy_(t)
    return out.o.to(torch.float32 if x.denominator else x.v.dtype), out.denominator


@fitting.or_else(_portable, _name)
def _launch(
    arguments: tuple, final: Tensor | None, final_z: Tensor | None, overlapped: bool = False, unit: float | None = None
) -> tuple[Tensor, Tensor | None]:
    """Run the kernel on the ``arguments`` of the op, into the given final states; returns o and the denominator."""
    q, k, v, decay, beta, read, write, bonus, initial, initial_z, cu, scale, normalized = arguments
    if v.shape[2] * (v.shape[0] if cu is None else cu.shape[0] - 1) == 0:
        o = torch.empty(v.shape, dtype=torch.float32 if normalized else v.dtype, device=v.device)
        return o, torch.empty(v.shape[:3], dtype=torch.float32, device=v.device) if normalized else None
    tokens = (*map(_walkable, (q, k, v)), _walkable(decay, _per_channel(decay)), _walkable(beta, vector=False))
    dense = (None if x is None else x.contiguous() for x in (bonus, initial, initial_z, cu))
    tensors = (*tokens, _walkable(read), _walkable(write), *dense, final, final_z)
    o, denominator = launch.run(_walk, v, tensors, scale, normalized, overlapped, unit)
    return o, denominator


def _per_channel(decay: Tensor | None) -> bool:
    return decay is not None and decay.ndim in (2, 4)


def _walk(recorder: launch.Recorder, *arguments: Any) -> launch.Tensors:
    """Launch the kernel; a call with the same shapes and strides replays the launch."""
    q, k, v, decay, beta, read, write, bonus, initial, initial_z, cu, final, final_z, scale, normalized, overlapped, unit = arguments
    (B, T, H, V), K = v.shape, k.shape[3]
    o = recorder.empty(B, T, H, V, dtype=torch.float32 if normalized else v.dtype)
    denominator = recorder.empty(B, T, H, dtype=torch.float32) if normalized else None
    states = H * (B if cu is None else cu.shape[0] - 1)
    BK, BV, warps = tile(K, V, states)
    steps = (*_steps(q), *_steps(k), *_steps(v), *_steps(decay, _per_channel(decay)), *_steps(beta, vector=False))
    overlap: dict[str, Any] = {"launch_pdl": True} if overlapped else {}
    how = launch.UNFUSED if SUMMED * warps > BK * BV else launch.FUSED
    recorder.launch(
        recurrence, (states * -(-V // BV), 1, 1),
        (q, k, v, decay, beta, read, write, bonus, initial, initial_z, cu, o, denominator, final, final_z),
        (*steps, *_steps(read), *_steps(write), T, scale, unit or 0.0),
        H=H, GROUP=H // k.shape[2], K=K, V=V, BK=BK, BV=BV, PER_CHANNEL=_per_channel(decay), UNIT=unit is not None, OVERLAPPED=overlapped,
        num_warps=warps, num_stages=1, **how, **overlap,
    )  # fmt: skip
    return o, denominator


def _recurrent(*arguments: Any) -> list[Tensor]:
    """The op: o, the denominator if ``normalized``, and with ``return_state`` the final states."""
    *call, return_state = arguments
    final, final_z = _states(Flat(*call)) if return_state else (None, None)
    return [t for t in (*_launch(tuple(call), final, final_z), final, final_z) if t is not None]


def _fake(*arguments: Any) -> list[Tensor]:
    *call, return_state = arguments
    x = Flat(*call)
    o = x.v.new_empty(x.v.shape, dtype=torch.float32 if x.denominator else x.v.dtype)
    out = [o, x.v.new_empty(x.v.shape[:3], dtype=torch.float32)] if x.denominator else [o]
    if return_state:
        out += [t for t in _states(x) if t is not None]
    return out


def _states(x: Flat) -> tuple[Tensor, Tensor | None]:
    """Allocate final states S [N, H, K, V] and, with a denominator, z [N, H, K]."""
    v, cu = x.v, x.cu_seqlens
    size = (v.shape[0] if cu is None else cu.shape[0] - 1, v.shape[2], x.k.shape[3])
    state = torch.empty((*size, v.shape[3]), dtype=torch.float32, device=v.device)
    return state, torch.empty(size, dtype=torch.float32, device=v.device) if x.denominator else None


_op = register(
    "recurrent",
    "(Tensor q, Tensor k, Tensor v, Tensor? decay, Tensor? beta, Tensor? read, Tensor? write, Tensor? bonus, Tensor? initial, "
    "Tensor? initial_z, Tensor? cu_seqlens, float scale, bool normalized, bool return_state) -> Tensor[]",
    _recurrent, _fake, tags=(torch.Tag.needs_exact_strides,),
)  # fmt: skip


def refusal(inputs: Inputs) -> str | None:
    """Reason why this kernel does not run ``inputs``, or None if it does."""
    return _unsuited(inputs) or fitting.refusal(_name(inputs.flat))


def _unsuited(inputs: Inputs) -> str | None:
    if not inputs.causal:
        return "its recurrent form is causal"
    if inputs.v.dtype == torch.float64:
        return "it has no float64"
    if inputs.k.shape[3] > LARGEST:
        return f"its recurrent form takes keys of at most {LARGEST} channels, not {inputs.k.shape[3]}"
    if tracing.wanted(*inputs.differentiable):
        return "its recurrent form has no gradients"
    return None


def recurrent(inputs: Inputs) -> Outputs:
    """``o`` [B, T, H, V] in v's dtype, in float32 beside a denominator; denominator and states float32, states if requested."""
    _refuse(inputs)
    out = iter(_op(*inputs.flat, inputs.return_state))
    o, denominator = next(out), next(out) if inputs.denominator else None
    return Outputs(o, denominator, next(out, None), next(out, None))


def step_(inputs: Inputs, *, overlapped: bool = False, unit: float | None = None) -> Outputs:
    """Run :func:`recurrent`, and write the final states over the initial ones, as in a captured decoding loop.
    ``overlapped``: on Hopper the states are read while earlier launches may still run; the caller ensures that none since the last one
    that waited for all others writes to them. ``unit``: an eps, by which q and k are first divided by √(Σ x² + eps).
    """
    _refuse(inputs)
    state, z = inputs.initial, inputs.initial_z
    if state is None or (inputs.denominator and z is None):
        raise ValueError("a step in place needs initial states, which it updates")
    if not all(t is None or (t.is_contiguous() and not t.is_neg()) for t in (state, z)):
        raise ValueError("a step in place needs contiguous states that are not negated views")
    overlapped = overlapped and gpu.capability(state.device) >= (9, 0)
    o, denominator = _launch(inputs.flat, state, z, overlapped, unit)
    return Outputs(o, denominator, state, z)


def _refuse(inputs: Inputs) -> None:
    reason = _unsuited(inputs)
    if reason is not None:
        raise NotImplementedError(f"the decode kernel cannot run this call: {reason}")
