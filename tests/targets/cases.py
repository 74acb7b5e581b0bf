"""Calls of every operation that has GPU kernels, forward and backward, for a :class:`tests.targets.machine.Machine` to compile."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product

import torch
from torch import Tensor

import linattn
from tests.ops import cases as calls

Case = Callable[[], None]
KINDS, RANKS = ("plain", "beta", "erase", "bonus"), ("none", "BTH", "BTHK")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def attention(kind: str, rank: str, dtype: torch.dtype, size: int, tokens: int = 2048) -> None:
    """Both passes over one head, in segments if long enough."""
    call = calls.make(kind, rank, B=1, T=tokens, H=1, K=size, V=size).to(dtype)
    leaves = {n: t.requires_grad_() for n, t in call.tensors.items()}
    arguments = calls.arguments(leaves, {**call.options, "return_state": True})
    o, state = linattn.linear_attention(**arguments, form="chunk", backend="triton")
    (o.float().sum() + state.sum()).backward()


def mixed(size: int) -> None:
    """RWKV-7 as under autocast: erasing vectors in float32 beside the rest in bfloat16, and no gradient of the decay."""
    call = calls.make("erase", "BTHK", B=1, T=2048, H=1, K=size, V=size).to(BF16)
    wide = call.with_(**{name: call.tensors[name].float() for name in ("read", "write")})
    leaves = {name: t.requires_grad_(name != "decay") for name, t in wide.tensors.items()}
    o = linattn.linear_attention(**calls.arguments(leaves, {**call.options, "return_state": False}), form="chunk", backend="triton")
    o.float().sum().backward()


def decode(kind: str, rank: str, dtype: torch.dtype, size: int) -> None:
    call = calls.make(kind, rank, B=2, T=1, H=4, K=size, V=size).to(dtype)
    linattn.linear_attention(**call.arguments(), form="recurrent", backend="triton")


def deferred(kind: str, rank: str, dtype: torch.dtype, size: int) -> None:
    from linattn.ops import checks
    from linattn.ops.inputs import Given
    from linattn.ops.torch.deferred import empty
    from linattn.ops.triton.deferred import step_

    call = calls.make(kind, rank, B=2, T=1, H=4, K=size, V=size).to(dtype)
    x = checks.call(Given(**call.arguments()))[0].flat
    step_(x, empty(x, 2, 12, torch.zeros(1, dtype=torch.int64)))


def scan(op: Callable, dtype: torch.dtype, tokens: int, constant: bool, packed: bool) -> None:
    decay = -torch.ones(*(() if constant else (1, tokens)), 256, requires_grad=True)
    x = torch.ones(1, tokens, 256, dtype=dtype, requires_grad=True)
    cu = torch.tensor([0, tokens // 2, tokens]) if packed else None
    h, last = op(decay, x, return_state=True, cu_seqlens=cu, backend="triton")
    (h.float().sum() + last.sum()).backward()


def selective(dtype: torch.dtype, size: int, packed: bool) -> None:
    x, dt = (torch.ones(1, 2048, 256, dtype=dtype, requires_grad=True) for _ in "xd")
    a, b, c = -torch.ones(256, size), torch.ones(1, 2048, size, dtype=dtype), torch.ones(1, 2048, size, dtype=dtype)
    leaves = [t.requires_grad_() for t in (a, b, c, torch.ones(256))]
    cu = torch.tensor([0, 1000, 2048]) if packed else None
    y, last = linattn.selective_scan(x, dt, *leaves, return_state=True, cu_seqlens=cu, backend="triton")
    (y.float().sum() + last.sum()).backward()


def selective_step(dtype: torch.dtype) -> None:
    from linattn.ops.selective_step import selective_step_

    x, b, a = torch.ones(2, 256, dtype=dtype), torch.ones(2, 16, dtype=dtype), -torch.ones(256, 16)
    selective_step_(torch.zeros(2, 256, 16), x, x, a, b, b, torch.ones(256), z=x, bias=torch.ones(256), softplus=True, backend="triton")


def short_convolution(dtype: torch.dtype, activation: bool) -> None:
    from linattn.ops.short_convolution import short_convolution as op

    x, before = (torch.ones(2, t, 256, dtype=dtype, requires_grad=True) for t in (100, 3))
    weight, bias = torch.ones(256, 1, 4, dtype=dtype, requires_grad=True), torch.ones(256, dtype=dtype, requires_grad=True)
    op(x, weight, bias, before=before, activation=activation, backend="triton").float().sum().backward()


def convolution_step(dtype: torch.dtype, size: int) -> None:
    from linattn.ops.triton.convolution_step import step_

    x, state, weight = (torch.ones(*shape, dtype=dtype) for shape in ((2, 1, 384), (2, 3, 384), (384, 1, 4)))
    step_(x, state, weight, None, True, size, 2 * size, 1e-6, True)


def norm(dtype: torch.dtype, size: int, gated: bool) -> None:
    from linattn.ops.norms import rms_norm

    x, gate = (torch.ones(64, 4, size, dtype=dtype, requires_grad=True) for _ in "xg")
    weight = torch.ones(size, dtype=dtype, requires_grad=True)
    rms_norm(x, weight, gate if gated else None, eps=1e-5, backend="triton").float().sum().backward()


def linears(dtype: torch.dtype, rows: int, gated: bool, width: int = 2048) -> None:
    from linattn.ops.torch.linears import Norm
    from linattn.ops.triton.linears import linears as op

    def ones(*shape: int) -> Tensor:
        return torch.ones(shape, dtype=dtype)

    x, counters = ones(rows, width), torch.zeros(256, dtype=torch.int32)
    weights = [ones(5632, width)] * 2 if gated else [ones(width, width), ones(16, width)]
    op(x, weights, [None] * 2, Norm(ones(width), 1e-5, width), None, gated, (), counters)


def quantised(to: str, rows: int, gated: bool, width: int = 2048) -> None:
    from linattn.models.quantised import Format
    from linattn.ops.torch.linears import Norm
    from linattn.ops.triton.quantised import linears as op

    def ones(*shape: int) -> Tensor:
        return torch.ones(shape, dtype=BF16)

    form = Format(to, 64 if to == "int4" else None)
    weights = [form.empty(5632, width)] * 2 if gated else [form.empty(width, width), ones(16, width)]
    op(ones(rows, width), weights, [None] * 2, Norm(ones(width), 1e-5, width), None, gated, (), torch.zeros(256, dtype=torch.int32))


def _all() -> dict[str, Case]:
    found: dict[str, Case] = {}
    for dtype, size in ((BF16, 128), (BF16, 64), (BF16, 256), (FP32, 128), (FP16, 128), (FP32, 256)):
        name = str(dtype).removeprefix("torch.")
        for kind, rank in product(KINDS, RANKS):
            found[f"attention-{kind}-{rank}-{name}-{size}"] = partial(attention, kind, rank, dtype, size)
    found["attention-erase-BTHK-mixed-128"] = partial(mixed, 128)
    for kind, rank, size in product(KINDS, RANKS, (64, 128, 256)):
        found[f"decode-{kind}-{rank}-bfloat16-{size}"] = partial(decode, kind, rank, BF16, size)
    for kind, rank, size in product(("plain", "beta"), RANKS, (64, 128, 256)):
        found[f"deferred-{kind}-{rank}-bfloat16-{size}"] = partial(deferred, kind, rank, BF16, size)
    for dtype in (BF16, FP32):
        name = str(dtype).removeprefix("torch.")
        for op, tokens, constant, packed in product((linattn.diagonal_scan, linattn.running_max), (4, 4096), (False, True), (False, True)):
            kind = f"{op.__name__}-{'constant' if constant else 'given'}-{'packed' if packed else 'rows'}"
            found[f"{kind}-{name}-{tokens}"] = partial(scan, op, dtype, tokens, constant, packed)
        for size, packed in product((16, 64, 256), (False, True)):
            found[f"selective_scan-{'packed' if packed else 'rows'}-{name}-{size}"] = partial(selective, dtype, size, packed)
        found[f"selective_step-{name}"] = partial(selective_step, dtype)
        for activation in (False, True):
            found[f"short_convolution-{'silu' if activation else 'plain'}-{name}"] = partial(short_convolution, dtype, activation)
        for size, gated in product((64, 128, 4096), (False, True)):
            found[f"norm-{'gated' if gated else 'plain'}-{name}-{size}"] = partial(norm, dtype, size, gated)
        for rows, gated in product((1, 4, 64), (False, True)):
            found[f"linears-{'gated' if gated else 'plain'}-{name}-{rows}"] = partial(linears, dtype, rows, gated)
        found[f"convolution_step-{name}"] = partial(convolution_step, dtype, 128)
    for to, rows, gated in product(("int8", "int4"), (1, 16), (False, True)):
        found[f"quantised-{to}-{'gated' if gated else 'plain'}-{rows}"] = partial(quantised, to, rows, gated)
    return found


CASES = _all()
