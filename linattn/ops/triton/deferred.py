"""Step of the recurrence with deferred writes of its states, for many rows: see linattn/ops/torch/deferred.py.

At many rows a step is bound by the states, which the kernel in decode.py reads and writes; this one reads them, and at every n-th call
writes them too. A program owns all K rows of BV columns of one state. Its share of the tokens in the slots is loaded as one tile, so
that all loads are in flight at once.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from linattn.ops import gpu
from linattn.ops.inputs import Flat
from linattn.ops.torch import deferred as portable
from linattn.ops.torch.deferred import Deferred
from linattn.ops.triton import fitting, launch
from linattn.ops.triton.decode import _factor, _fade, _steps

LARGEST = 256  # most channels of a key
COLUMNS, WARPS = 64, 4  # of a program


@triton.jit(do_not_specialize=["decay_row", "decay_head", "beta_row", "beta_head"])
def deferred_step(
    q, k, v, decay, beta, state, keys, values, decays, count, o,
    q_row, q_head, k_row, k_head, v_row, v_head, decay_row, decay_head, beta_row, beta_head,
    scale,
    H: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    SLOTS: tl.constexpr, BN: tl.constexpr, PER_CHANNEL: tl.constexpr, OVERLAPPED: tl.constexpr,
):  # fmt: skip
    """Read one token for one block of columns of one state; ``decay`` and ``decays`` or ``beta`` may be None.

    OVERLAPPED: the state is read while the previous launch may still run, and the next launch may start at once.
    """
    if OVERLAPPED:
        tl.extra.cuda.gdc_launch_dependents()
    blocks: tl.constexpr = (V + BV - 1) // BV
    program = tl.program_id(0)
    block = program % blocks
    own = (program // blocks).to(tl.int64)
    head = own % H
    n = own // H
    shared = n * (H // GROUP) + head // GROUP
    channels = tl.arange(0, BK)
    columns = block * BV + tl.arange(0, BV)
    slots = tl.arange(0, BN)
    in_k = channels < K
    in_v = columns < V
    tile = own * K * V + channels[:, None] * V + columns[None, :]
    inside = in_k[:, None] & in_v[None, :]
    s = tl.load(state + tile, mask=inside, other=0.0)

    if OVERLAPPED:
        tl.extra.cuda.gdc_wait()
    used = (tl.load(count) % SLOTS).to(tl.int32)
    taken = slots < used
    behind = slots + 1 < used
    qt = tl.load(q + n * q_row + head // GROUP * q_head + channels, mask=in_k, other=0.0).to(tl.float32) * scale
    kt = tl.load(k + n * k_row + head // GROUP * k_head + channels, mask=in_k, other=0.0)
    vt = tl.load(v + n * v_row + head * v_head + columns, mask=in_v, other=0.0)
    key_place = keys + shared * SLOTS * K + channels
    value_place = values + own * SLOTS * V + columns
    w = tl.load(key_place[None, :] + slots[:, None] * K, mask=taken[:, None] & in_k[None, :], other=0.0).to(tl.float32)
    u = tl.load(value_place[None, :] + slots[:, None] * V, mask=taken[:, None] & in_v[None, :], other=0.0).to(tl.float32)
    if decay is not None:
        # The slot behind each: a difference of two sums would be none after a reset.
        if PER_CHANNEL:
            decay_place = decays + own * SLOTS * K + channels
            log = tl.load(decay + n * decay_row + head * decay_head + channels, mask=in_k, other=0.0).to(tl.float32)
            first = tl.load(decay_place, mask=in_k & (used > 0), other=0.0)
            later = tl.load(decay_place[None, :] + slots[:, None] * K + K, mask=behind[:, None] & in_k[None, :], other=0.0)
            total = tl.sum(later, 0) + first + log
            w *= tl.exp(tl.cumsum(later, 0, reverse=True) + log[None, :])
            factor = tl.exp(total)
            s = tl.where(factor[:, None] > 0.0, s, 0.0)
        else:
            decay_place = decays + own * SLOTS
            log = tl.load(decay + n * decay_row + head * decay_head).to(tl.float32)
            first = tl.load(decay_place, mask=used > 0, other=0.0)
            later = tl.load(decay_place + slots + 1, mask=behind, other=0.0)
            total = tl.sum(later, 0) + first + log
            w *= tl.exp(tl.cumsum(later, 0, reverse=True) + log)[:, None]
            factor = tl.exp(total)
            s = tl.where(factor > 0.0, s, 0.0)
    else:
        factor = 1.0
    k32 = kt.to(tl.float32)
    new = vt.to(tl.float32)
    out = tl.sum((qt * factor)[:, None] * s, 0) + tl.sum(tl.sum(w * qt[None, :], 1)[:, None] * u, 0)
    if beta is not None:
        bt = tl.load(beta + n * beta_row + head * beta_head).to(tl.float32)
        held = tl.sum((k32 * factor)[:, None] * s, 0) + tl.sum(tl.sum(w * k32[None, :], 1)[:, None] * u, 0)
        new = bt * (new - held)
    out += tl.sum(qt * k32, 0) * new
    tl.store(o + own * V + columns, out, mask=in_v)

    if used < SLOTS - 1:
        first_block = block == 0
        tl.store(key_place + used * K, kt, mask=in_k & first_block & (head % GROUP == 0))
        tl.store(value_place + used * V, new, mask=in_v)
        if decay is not None:
            if PER_CHANNEL:
                tl.store(decay_place + used * K, log, mask=in_k & first_block)
            else:
                tl.store(decay_place + used, log, mask=first_block)
    else:
        fresh = k32[:, None] * new[None, :]
        if decay is not None:
            since = log
        slot = SLOTS - 2
        while slot >= 0:
            kj = tl.load(key_place + slot * K, mask=in_k, other=0.0).to(tl.float32)
            uj = tl.load(value_place + slot * V, mask=in_v, other=0.0).to(tl.float32)
            if decay is not None:
                kj *= tl.exp(since)
                if PER_CHANNEL:
                    since += tl.load(decay_place + slot * K, mask=in_k, other=0.0)
                else:
                    since += tl.load(decay_place + slot)
            fresh += kj[:, None] * uj[None, :]
            slot -= 1
        if decay is not None:
            keep, rest = _factor(total)
            s = _fade(s, keep[:, None], rest[:, None], fresh) if PER_CHANNEL else _fade(s, keep, rest, fresh)
        else:
            s += fresh
        tl.store(state + tile, s, mask=inside)


def _name(x: Flat, *_: object) -> Hashable:
    """Key of a call in the record of kernels that do not fit."""
    rank = None if x.decay is None else x.decay.ndim in (2, 4)
    return "deferred", x.v.device, x.v.dtype, x.k.shape[3], x.v.shape[3], rank, x.beta is None


def refusal(x: Flat) -> str | None:
    """Reason why the kernel does not run calls like ``x``, or None if it does."""
    if x.k.shape[3] > LARGEST:
        return f"writes are deferred for keys of at most {LARGEST} channels, not {x.k.shape[3]}"
    return portable.refusal(x) or fitting.refusal(_name(x))


@fitting.or_else(portable.step_, _name)
def step_(x: Flat, deferred: Deferred) -> Tensor:
    """Run :func:`linattn.ops.torch.deferred.step_`."""
    tensors = (*(t if t is None or t.stride(-1) == 1 else t.contiguous() for t in (x.q, x.k, x.v, x.decay)), x.beta, x.initial)
    overlapped = gpu.capability(x.v.device) >= (9, 0) if x.v.is_cuda else False
    o: Tensor = launch.run(_body, x.v, (*tensors, *deferred), x.scale, overlapped)[0]
    return o


def _body(recorder: launch.Recorder, *arguments: Any) -> launch.Tensors:
    q, k, v, decay, beta, state, keys, values, decays, count, scale, overlapped = arguments
    (rows, _, H, V), K, slots = v.shape, k.shape[3], keys.shape[2]
    per_channel = decay is not None and decay.ndim in (2, 4)
    o = recorder.empty(rows, 1, H, V, dtype=v.dtype)
    BK, BV = triton.next_power_of_2(K), min(COLUMNS, triton.next_power_of_2(V))
    overlap: dict[str, Any] = {"launch_pdl": True} if overlapped else {}
    recorder.launch(
        deferred_step, (rows * H * -(-V // BV), 1, 1), (q, k, v, decay, beta, state, keys, values, decays, count, o),
        (*_rows(q), *_rows(k), *_rows(v), *_rows(decay, per_channel), *_rows(beta, vector=False), scale),
        H=H, GROUP=H // k.shape[2], K=K, V=V, BK=BK, BV=BV, SLOTS=slots, BN=triton.next_power_of_2(slots),
        PER_CHANNEL=per_channel, OVERLAPPED=overlapped, num_warps=max(1, WARPS * BK * BV // (128 * COLUMNS)), num_stages=1, **overlap,
    )  # fmt: skip
    return (o,)


def _rows(x: Tensor | None, vector: bool = True) -> tuple[int, int]:
    """Strides over rows and heads; those of a constant, [H] or [H, K], are 0 over rows."""
    return _steps(x, vector)
