"""Step of the recurrence with deferred writes of its states, for many rows: see linattn/ops/torch/deferred.py.

At many rows a step is bound by the memory traffic of states, which the kernel in decode.py reads and writes; ``deferred_step`` writes
them only at every n-th call. A program owns all K rows of BV columns of one state. ``weigh`` precomputes what its blocks share, so that
a program has little work between its loads.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from linattn.ops import gpu
from linattn.ops.inputs import Flat
from linattn.ops.torch import deferred as portable
from linattn.ops.torch.deferred import Deferred
from linattn.ops.triton import fitting, launch
from linattn.ops.triton.decode import _factor, _fade, _own_state, _own_tile, _steps

LARGEST = 256  # most channels of a key
COLUMNS, NUMBERS = 32, 64  # of a program; per thread


@triton.jit(do_not_specialize=["decay_row", "decay_head"])
def weigh(
    q, k, decay, keys, decays, calls, weighed, products,
    q_row, q_head, k_row, k_head, decay_row, decay_head,
    scale,
    H: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, SLOTS: tl.constexpr, BN: tl.constexpr,
    PER_CHANNEL: tl.constexpr, OVERLAPPED: tl.constexpr,
):  # fmt: skip
    """Compute for one state what its blocks of columns share.

    ``weighed`` [N, H, 3 + n, K] float32: q and k times the decays since the state, and for the last call of n the sum of the logarithms
    of these decays and the keys, the token's own last, times the decays since each.
    ``products`` [N, H, 2, BN] float32: q and k times the keys in the slots; the first free slot has those with the token's own key.
    """
    if OVERLAPPED:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    own = tl.program_id(0).to(tl.int64)
    head = own % H
    n = own // H
    channels, slots = tl.arange(0, BK), tl.arange(0, BN)
    in_k = channels < K
    used = (tl.load(calls) % SLOTS).to(tl.int32)
    taken, behind = slots < used, slots + 1 < used
    qt = tl.load(q + n * q_row + head // GROUP * q_head + channels, mask=in_k, other=0.0).to(tl.float32) * scale
    kt = tl.load(k + n * k_row + head // GROUP * k_head + channels, mask=in_k, other=0.0)
    key_place = keys + (n * (H // GROUP) + head // GROUP) * SLOTS * K + channels
    w = tl.load(key_place[None, :] + slots[:, None] * K, mask=taken[:, None] & in_k[None, :], other=0.0).to(tl.float32)
    total = 0.0
    if decay is not None:
        # Sums after each slot; a difference of two sums would be NaN after a reset.
        if PER_CHANNEL:
            decay_place = decays + own * SLOTS * K + channels
            log = tl.load(decay + n * decay_row + head * decay_head + channels, mask=in_k, other=0.0).to(tl.float32)
            first = tl.load(decay_place, mask=in_k & (used > 0), other=0.0)
            later = tl.load(decay_place[None, :] + slots[:, None] * K + K, mask=behind[:, None] & in_k[None, :], other=0.0)
            total = tl.sum(later, 0) + first + log
            w *= tl.exp(tl.cumsum(later, 0, reverse=True) + log[None, :])
            if used < SLOTS - 1:
                tl.store(decay_place + used * K, log, mask=in_k)
        else:
            decay_place = decays + own * SLOTS
            log = tl.load(decay + n * decay_row + head * decay_head).to(tl.float32)
            first = tl.load(decay_place, mask=used > 0, other=0.0)
            later = tl.load(decay_place + slots + 1, mask=behind, other=0.0)
            total = tl.sum(later, 0) + first + log
            w *= tl.exp(tl.cumsum(later, 0, reverse=True) + log)[:, None]
            if used < SLOTS - 1:
                tl.store(decay_place + used, log)
    k32 = kt.to(tl.float32)
    at = weighed + own * (3 + SLOTS) * K + channels
    tl.store(at, qt * tl.exp(total), mask=in_k)
    tl.store(at + K, k32 * tl.exp(total), mask=in_k)
    here = slots == used
    place = products + own * 2 * BN + slots
    tl.store(place, tl.where(here, tl.sum(qt * k32, 0), tl.sum(w * qt[None, :], 1)))
    tl.store(place + BN, tl.sum(w * k32[None, :], 1))
    if used < SLOTS - 1:
        tl.store(key_place + used * K, kt, mask=in_k & (head % GROUP == 0))
    else:
        tl.store(at + 2 * K, total + tl.zeros([BK], tl.float32), mask=in_k)
        own_key = tl.where(here[:, None], k32[None, :], w)
        tl.store(at[None, :] + (3 + slots)[:, None] * K, own_key, mask=(slots < SLOTS)[:, None] & in_k[None, :])


@triton.jit(do_not_specialize=["beta_row", "beta_head"])
def deferred_step(
    v, beta, state, values, calls, weighed, products, o,
    v_row, v_head, beta_row, beta_head,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, SLOTS: tl.constexpr, BN: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):  # fmt: skip
    """Read one token for one block of columns of one state; the last call of n writes the state.

    OVERLAPPED: the state is read while the previous launch may still run, and the next launch may start at once.
    """
    if OVERLAPPED:
        tl.extra.cuda.gdc_launch_dependents()
    block, own, head, n = _own_state(H, V, BV)
    channels, columns, in_k, in_v, tile, inside = _own_tile(block, own, K, V, BK, BV)
    slots = tl.arange(0, BN)
    s = tl.load(state + tile, mask=inside, other=0.0)

    if OVERLAPPED:
        tl.extra.cuda.gdc_wait()
    used = (tl.load(calls) % SLOTS).to(tl.int32)
    at = weighed + own * (3 + SLOTS) * K + channels
    value_place = values + own * SLOTS * V + columns
    qt = tl.load(at, mask=in_k, other=0.0)
    new = tl.load(v + n * v_row + head * v_head + columns, mask=in_v, other=0.0).to(tl.float32)
    place = products + own * 2 * BN
    from_q = tl.load(place + slots)
    u = tl.load(value_place[None, :] + slots[:, None] * V, mask=(slots < used)[:, None] & in_v[None, :], other=0.0).to(tl.float32)
    if beta is not None:
        kt = tl.load(at + K, mask=in_k, other=0.0)
        from_k = tl.load(place + BN + slots)
        bt = tl.load(beta + n * beta_row + head * beta_head).to(tl.float32)
        held = tl.sum(tl.where(kt[:, None] != 0.0, kt[:, None] * s, 0.0), 0)
        new = bt * (new - held - tl.sum(from_k[:, None] * u, 0))
    out = tl.sum(tl.where(qt[:, None] != 0.0, qt[:, None] * s, 0.0), 0)  # after a reset the state is masked, including infinities
    out += tl.sum(from_q[:, None] * tl.where((slots == used)[:, None], new[None, :], u), 0)
    tl.store(o + own * V + columns, out, mask=in_v)

    if used < SLOTS - 1:
        tl.store(value_place + used * V, new, mask=in_v)
    else:
        written = tl.load(at + (2 + SLOTS) * K, mask=in_k, other=0.0)[:, None] * new[None, :]
        for slot in range(SLOTS - 1):
            key = tl.load(at + (3 + slot) * K, mask=in_k, other=0.0)
            value = tl.load(value_place + slot * V, mask=in_v, other=0.0).to(tl.float32)
            written += key[:, None] * value[None, :]
        keep, rest = _factor(tl.load(at + 2 * K, mask=in_k, other=0.0))
        tl.store(state + tile, _fade(s, keep[:, None], rest[:, None], written), mask=inside)


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
    q, k, v, decay, beta, state, keys, values, decays, calls, scale, overlapped = arguments
    (rows, _, H, V), K, slots = v.shape, k.shape[3], keys.shape[2]
    per_channel = decay is not None and decay.ndim in (2, 4)
    o = recorder.empty(rows, 1, H, V, dtype=v.dtype)
    BK, BV, BN = triton.next_power_of_2(K), min(COLUMNS, triton.next_power_of_2(V)), triton.next_power_of_2(slots)
    weighed = recorder.empty(rows, H, 3 + slots, K, dtype=torch.float32)
    products = recorder.empty(rows, H, 2, BN, dtype=torch.float32)
    overlap: dict[str, Any] = {"OVERLAPPED": overlapped} | ({"launch_pdl": True} if overlapped else {})
    recorder.launch(
        weigh, (rows * H, 1, 1), (q, k, decay, keys, decays, calls, weighed, products),
        (*_steps(q), *_steps(k), *_steps(decay, per_channel), scale),
        H=H, GROUP=H // k.shape[2], K=K, BK=BK, SLOTS=slots, BN=BN, PER_CHANNEL=per_channel, num_warps=2, num_stages=1, **overlap,
    )  # fmt: skip
    recorder.launch(
        deferred_step, (rows * H * -(-V // BV), 1, 1), (v, beta, state, values, calls, weighed, products, o),
        (*_steps(v), *_steps(beta, vector=False)),
        H=H, K=K, V=V, BK=BK, BV=BV, SLOTS=slots, BN=BN, num_warps=max(1, BK * BV // (32 * NUMBERS)), num_stages=1,
        **launch.UNFUSED, **overlap,
    )  # fmt: skip
    return (o,)
