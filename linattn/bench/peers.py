"""Peers: pure PyTorch code in use on CPUs today, with our equivalent call.

A peer takes its ``inputs`` and returns [B, T, H, D] (the scans [B, T, D]).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor

from linattn.bench import straightforward, wheels
from linattn.ops import diagonal_scan, linear_attention, selective_scan
from linattn.ops.inputs import Backend

Inputs = dict[str, Tensor]
Run = Callable[[Inputs], Tensor]
CHUNK = 64


def inputs(tokens: int, dtype: torch.dtype, *, gradients: bool, heads: int = 8, dim: int = 64) -> Inputs:
    """Make q, k, v [1, T, H, D] (k of unit length), decays and rates of one seed, one shared key and query head."""
    make = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=make)

    shape = (1, tokens, heads)
    x = {"q": normal(*shape, dim), "k": F.normalize(normal(*shape, dim), dim=-1), "v": normal(*shape, dim)}
    x |= {"q1": normal(1, tokens, 1, dim), "k1": normal(1, tokens, 1, dim)}
    x = {name: t.to(dtype) for name, t in x.items()}
    x |= {"decay": F.logsigmoid(normal(*shape)) / 16, "channel": F.logsigmoid(normal(*shape, dim)) / 16, "beta": normal(*shape).sigmoid()}
    return {name: t.requires_grad_(gradients) for name, t in x.items()}


def scan_inputs(tokens: int, dtype: torch.dtype, *, gradients: bool, heads: int = 8, dim: int = 64) -> Inputs:
    """Make x and Δ [1, T, H D], A [H D, 16], B and C [1, T, 16] of Mamba, and −Δ as a decay."""
    make = torch.Generator().manual_seed(0)
    width = heads * dim
    x = {"x": torch.randn(1, tokens, width, generator=make).to(dtype)}
    x |= {"dt": 0.1 * torch.rand(1, tokens, width, generator=make), "A": -torch.rand(width, 16, generator=make)}
    x["decay"] = -x["dt"]
    x |= {name: torch.randn(1, tokens, 16, generator=make).to(dtype) for name in "BC"}
    return {name: t.requires_grad_(gradients) for name, t in x.items()}


@dataclass(frozen=True)
class Peer:
    """Other code, ours for the same result, and the wanted speed-up: {(mode, T): ratio} in the first of ``dtypes``."""

    name: str
    what: str
    load: Callable[[], Run]
    ours: Run
    targets: dict[tuple[str, int], float]
    longest: dict[str, int] = field(default_factory=lambda: {"forward": 16384, "forward+backward": 4096})  # longer sequences take minutes
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)
    inputs: Callable[..., Inputs] = inputs
    same: bool = True  # computes the same result as ours
    forward: bool = False  # timed without a backward pass; ours as in the mode


def plain(x: Inputs, backend: Backend = "auto") -> Tensor:
    return linear_attention(x["q"], x["k"], x["v"], backend=backend)


def head(x: Inputs, backend: Backend = "auto") -> Tensor:
    return linear_attention(x["q"], x["k"], x["v"], decay=x["decay"], backend=backend)


def channel(x: Inputs, backend: Backend = "auto") -> Tensor:
    return linear_attention(x["q"], x["k"], x["v"], decay=x["channel"], backend=backend)


def gated_delta(x: Inputs, backend: Backend = "auto") -> Tensor:
    return linear_attention(x["q"], x["k"], x["v"], decay=x["decay"], beta=x["beta"], backend=backend)


def kimi_delta(x: Inputs, backend: Backend = "auto") -> Tensor:
    return linear_attention(x["q"], x["k"], x["v"], decay=x["channel"], beta=x["beta"], backend=backend)


FAMILIES = {"none": plain, "head": head, "channel": channel, "gated-delta": gated_delta, "kimi-delta": kimi_delta}


def _portable(family: str) -> Peer:
    """Portable form, which runs where there are no kernels."""
    ours, longest = FAMILIES[family], {"forward": 4096, "forward+backward": 4096}
    return Peer(f"portable-{family}", f"linattn, the portable form ({family})", lambda: partial(ours, backend="torch"), ours, {}, longest)


def _straightforward(family: str, run: Run, ratio: float) -> Peer:
    longest = {"forward": 16384 if family == "channel" else 65536, "forward+backward": 4096}
    return Peer(f"chunks-{family}", f"chunks in plain torch ({family})", lambda: run, FAMILIES[family], {("forward", 4096): ratio}, longest)


def _against_softmax(family: str, ratio: float, ahead: int) -> Peer:
    """Softmax attention; ``ahead`` is the length from which ours must be faster."""
    what = f"torch scaled_dot_product_attention (causal; ours: {family})"
    return Peer(f"softmax-{family}", what, _softmax, FAMILIES[family], {("forward", ahead): 1.0, ("forward", 4096): ratio}, same=False)


def _passes(family: str, ratio: float) -> Peer:
    """Cost of a backward pass."""
    ours, longest = FAMILIES[family], {"forward": 0, "forward+backward": 16384}
    what = f"linattn, forward alone ({family}; ours: forward and backward, at most {ratio:.0f} times as long)"
    return Peer(f"passes-{family}", what, lambda: ours, ours, {("forward+backward", 4096): 1 / ratio}, longest, forward=True)


def state_space(x: Inputs) -> Tensor:
    """Mamba-2 with Δ = β and A = -1: one group of keys and queries for all heads."""
    return linear_attention(x["q1"], x["k1"], x["v"] * x["beta"][..., None].to(x["v"].dtype), decay=-x["beta"], scale=1.0)


def _gated_delta() -> Run:
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule as run

    return lambda x: run(x["q"], x["k"], x["v"], x["decay"], x["beta"])[0]


def _kimi_delta() -> Run:
    from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention as run

    return lambda x: run(x["q"], x["k"], x["v"], x["channel"], x["beta"])[0]


def _state_space(version: str) -> Callable[[], Run]:
    def load() -> Run:
        names = ("mamba2_chunk_scan", "segment_sum", "pad_tensor_by_size", "reshape_into_chunks")
        run = wheels.functions(wheels.path(f"transformers=={version}") / "transformers/models/mamba2/modeling_mamba2.py", *names)[0]
        return lambda x: run(x["v"], x["beta"], -torch.ones(x["v"].shape[2]), x["k1"], x["q1"], CHUNK)

    return load


def mamba(x: Inputs) -> Tensor:
    return selective_scan(x["x"], x["dt"], x["A"], x["B"], x["C"], return_state=True)[0]


def _mamba() -> Run:
    from transformers.models.mamba.modeling_mamba import mamba_selective_scan as run

    def theirs(x: Inputs) -> Tensor:
        y = run(x["x"].transpose(1, 2), x["dt"].transpose(1, 2), x["A"], x["B"].transpose(1, 2), x["C"].transpose(1, 2))
        return y.transpose(1, 2)

    return theirs


def scan(x: Inputs) -> Tensor:
    return diagonal_scan(x["decay"], x["x"], return_state=True)[0]


def _token_loop() -> Run:
    """Token loop: the recurrence as a paper states it."""

    def run(x: Inputs) -> Tensor:
        q, k, v, alpha = x["q"].float() * x["q"].shape[-1] ** -0.5, x["k"].float(), x["v"].float(), x["decay"].exp()
        state, outputs = torch.zeros_like(k[:, 0, :, :, None] * v[:, 0, :, None, :]), []
        for t in range(v.shape[1]):
            state = alpha[:, t, :, None, None] * state + k[:, t, :, :, None] * v[:, t, :, None, :]
            outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state))
        return torch.stack(outputs, 1).to(x["v"].dtype)

    return run


def _softmax() -> Run:
    def run(x: Inputs) -> Tensor:
        q, k, v = (x[name].transpose(1, 2) for name in "qkv")
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    return run


def _products() -> Run:
    """Only the four products of every chunk of 64 tokens: scores, scores with values, keys with values, and queries with the state."""

    def run(x: Inputs) -> Tensor:
        q, k, v = (x[name][0].reshape(-1, CHUNK, x[name].shape[-1]) for name in "qkv")
        scores, state = torch.bmm(q, k.transpose(1, 2)), torch.bmm(k.transpose(1, 2), v)
        torch.bmm(scores, v)
        return torch.bmm(q, state)

    return run


@cache
def all_peers() -> dict[str, Peer]:
    """List all peers by name. Names include versions, so that an upgrade does not change a comparison."""
    import transformers

    logging.getLogger("transformers").setLevel(logging.ERROR)  # warns about its fallback, which is measured on purpose
    installed, half = transformers.__version__, (torch.bfloat16,)
    peers = [
        Peer("gated-delta", f"transformers {installed} torch_chunk_gated_delta_rule", _gated_delta, gated_delta,
             {("forward", 4096): 8.0, ("forward+backward", 4096): 4.0}),
        Peer("kimi-delta", f"transformers {installed} chunk_kimi_delta_attention", _kimi_delta, kimi_delta,
             {("forward", 4096): 40.0}, {"forward": 4096, "forward+backward": 1024}),
        Peer("mamba2-5.17", "transformers 5.17.0 mamba2_chunk_scan", _state_space("5.17.0"), state_space,
             {("forward", 4096): 10.0}, {"forward": 4096, "forward+backward": 1024}),
        Peer("mamba2-5.23", "transformers 5.23.0 mamba2_chunk_scan", _state_space("5.23.0"), state_space, {("forward", 4096): 1.5}),
        Peer("selective-scan", f"transformers {installed} mamba_selective_scan", _mamba, mamba,
             {("forward", 1024): 20.0}, {"forward": 4096, "forward+backward": 256}, inputs=scan_inputs),
        Peer("diagonal-scan", "torch.add of as many numbers (ours: diagonal_scan)", lambda: lambda x: torch.add(x["dt"], x["x"]), scan,
             {("forward", 16384): 0.8}, {"forward": 65536, "forward+backward": 0}, inputs=scan_inputs, same=False),
        Peer("products", "torch.bmm of the same products alone (ours: head, at most 1.3 times as long)", _products, head,
             {("forward", 4096): 1 / 1.3}, {"forward": 65536, "forward+backward": 0}, half, same=False),
        Peer("token-loop", "a loop over tokens with a decay per head", _token_loop, head,
             {("forward+backward", 1024): 50.0}, {"forward": 4096, "forward+backward": 1024}),
        Peer("per-head", "linattn, decay per head (ours: per channel; at least 1/3)", lambda: head, channel,
             {("forward", 4096): 1 / 3, ("forward+backward", 4096): 1 / 3}, same=False),
        *(_straightforward(*x) for x in (("none", straightforward.plain, 5.0), ("head", straightforward.head, 5.0),
                                         ("channel", straightforward.channel, 20.0))),
        *(_against_softmax(*x) for x in (("none", 15.0, 256), ("head", 15.0, 256), ("channel", 8.0, 512),
                                         ("gated-delta", 4.0, 1024), ("kimi-delta", 4.0, 1024))),
        *(_passes(*x) for x in (("none", 5.0), ("head", 5.0), ("channel", 6.0), ("gated-delta", 5.0), ("kimi-delta", 6.0))),
        *map(_portable, FAMILIES),
    ]  # fmt: skip
    return {p.name: p for p in peers}
