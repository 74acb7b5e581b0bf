"""Simulated machines: properties of their devices as torch reports them, and a call of every operation on such a device.

The tensors are on the CPU but report another device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import linattn
from linattn.ops import gpu

T, H, K = 20, 2, 64


def properties(major: int, minor: int, name: str = "a card", shared: int = 99 << 10, processors: int = 40) -> Any:
    return SimpleNamespace(
        major=major, minor=minor, name=name, shared_memory_per_block_optin=shared, multi_processor_count=processors
    )  # fmt: skip


class Claimed(TorchFunctionMode):
    """Context in which every tensor reports ``device``, without creating any there."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.claimed = torch.device(device)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function == Tensor.device.__get__:
            return self.claimed
        if function == Tensor.is_cuda.__get__:
            return self.claimed.type == "cuda"
        args = [torch.device("cpu") if isinstance(x, torch.device) else x for x in args]
        kwargs = {n: "cpu" if n == "device" and x is not None else x for n, x in (kwargs or {}).items()}
        return function(*args, **kwargs)


@contextmanager
def machine(patch: Any, *cards: Any, hip: str | None = None, device: str = "cuda:0") -> Iterator[None]:
    """Make torch report these ``cards``, and tensors the ``device``; ``patch`` is pytest's monkeypatch."""
    with patch.context() as p:
        p.setattr(torch.version, "hip", hip)
        p.setattr(torch.cuda, "is_available", lambda: bool(cards))
        p.setattr(torch.cuda, "current_device", lambda: 0)
        p.setattr(torch.cuda, "get_device_properties", lambda device: cards[device.index])
        gpu._known.cache_clear()
        try:
            with Claimed(device):
                yield
        finally:
            gpu._known.cache_clear()


def calls() -> dict[str, Callable[[], Any]]:
    """A call of each operation."""
    from linattn.ops import gated, linears, norms, recurrent_step, selective_step, short_convolution
    from linattn.ops.convolution_step import step_
    from linattn.ops.pattern import attend, local
    from linattn.ops.torch.quantised import Quantised

    def ones(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.ones(shape, dtype=dtype)

    def wide(*shape: int) -> Tensor:
        return ones(*shape, dtype=torch.float32)

    q, decay, x, dt = ones(1, T, H, K), -wide(1, T, H, K), ones(1, T, 64), wide(1, T, 64)
    state, token = wide(1, H, K, K), ones(1, 1, H, K)
    a, b = -wide(64, 16), wide(1, T, 16)
    weight = ones(64, 1, 4)
    return {
        "linear_attention": lambda: linattn.linear_attention(q, q, q, decay=decay),
        "linear_attention of a token": lambda: linattn.linear_attention(token, token, token, initial_state=state, return_state=True),
        "diagonal_scan": lambda: linattn.diagonal_scan(-dt, x),
        "running_max": lambda: linattn.running_max(-dt, x),
        "selective_scan": lambda: linattn.selective_scan(x, dt, a, b, b),
        "selective_step_": lambda: selective_step.selective_step_(wide(1, 64, 16), x[:, 0], dt[:, 0], a, b[:, 0], b[:, 0]),
        "recurrent_step_": lambda: recurrent_step.recurrent_step_(state, token, token, token),
        "long_conv": lambda: linattn.long_conv(x, wide(T, 64)),
        "lti": lambda: linattn.lti(x, -wide(64, 4), wide(64, 4), wide(64, 4)),
        "rms_norm": lambda: norms.rms_norm(x, ones(64), x, eps=1e-6),
        "unit_length": lambda: norms.unit_length(x, eps=1e-6, dtype=torch.bfloat16),
        "gated": lambda: gated.gated(x, x),
        "short_convolution": lambda: short_convolution.short_convolution(x, weight),
        "convolution_step": lambda: step_(x[:, :1], ones(1, 3, 64), weight, None, True),
        "linears": lambda: linears.linears(x[:, 0], [ones(32, 64)], [None]),
        "linears of a quantised matrix": lambda: linears.linears(x[:, 0], [Quantised(ones(32, 64, dtype=torch.int8), wide(32))], [None]),
        "attend": lambda: attend(q, q, q, local(8)),
    }  # fmt: skip


def explained() -> dict[str, str]:
    """Output of explain for all its operations."""
    q = torch.ones(1, T, H, K, dtype=torch.bfloat16)
    x = torch.ones(1, T, 64)
    a, b = -torch.ones(64, 16), torch.ones(1, T, 16)
    return {
        "linear_attention": linattn.explain(q, q, q),
        "diagonal_scan": linattn.explain(linattn.diagonal_scan, -x, x),
        "running_max": linattn.explain(linattn.running_max, -x, x),
        "selective_scan": linattn.explain(linattn.selective_scan, x, x, a, b, b),
    }
