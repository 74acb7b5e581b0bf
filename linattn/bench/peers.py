"""The pure PyTorch code that a CPU user has today, each beside the call of ours that computes the same.

A peer takes the inputs of :func:`inputs` and returns [B, T, H, D].
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor

from linattn.bench import wheels
from linattn.ops import linear_attention

Run = Callable[[dict[str, Tensor]], Tensor]


@dataclass(frozen=True)
class Peer:
    """Somebody's code, ours for the same, and how much faster ours has to be: {(mode, T): ratio}."""

    name: str
    what: str
    load: Callable[[], Run]
    ours: Run
    targets: dict[tuple[str, int], float]
    longest: dict[str, int]  # mode -> the longest T that is worth waiting for
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)


def inputs(tokens: int, dtype: torch.dtype, *, gradients: bool) -> dict[str, Tensor]:
    """B 1, H 8, D 64: q, k, v [B, T, H, D] (k of unit length), decays and rates of one seed, one shared key and query head."""
    make = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=make)

    shape = (1, tokens, 8)
    x = {"q": normal(*shape, 64), "k": F.normalize(normal(*shape, 64), dim=-1), "v": normal(*shape, 64)}
    x |= {"q1": normal(1, tokens, 1, 64), "k1": normal(1, tokens, 1, 64)}
    x = {name: t.to(dtype) for name, t in x.items()}
    x |= {"decay": F.logsigmoid(normal(*shape)) / 16, "channel": F.logsigmoid(normal(*shape, 64)) / 16, "beta": normal(*shape).sigmoid()}
    return {name: t.requires_grad_(gradients) for name, t in x.items()}


def plain(x: dict[str, Tensor], backend: str = "auto") -> Tensor:
    return linear_attention(x["q"], x["k"], x["v"], backend=backend)


def head(x: dict[str, Tensor], backend: str = "auto") -> Tensor:
    return linear_attention(x["q"], x["k"], x["v"], decay=x["decay"], backend=backend)


def channel(x: dict[str, Tensor], backend: str = "auto") -> Tensor:
    return linear_attention(x["q"], x["k"], x["v"], decay=x["channel"], backend=backend)


def gated_delta(x: dict[str, Tensor], backend: str = "auto") -> Tensor:
    return linear_attention(x["q"], x["k"], x["v"], decay=x["decay"], beta=x["beta"], backend=backend)


def kimi_delta(x: dict[str, Tensor], backend: str = "auto") -> Tensor:
    return linear_attention(x["q"], x["k"], x["v"], decay=x["channel"], beta=x["beta"], backend=backend)


FAMILIES = {"none": plain, "head": head, "channel": channel, "gated-delta": gated_delta, "kimi-delta": kimi_delta}


def _portable(family: str) -> Peer:
    """What runs where there are no kernels."""
    ours, longest = FAMILIES[family], {"forward": 16384, "forward+backward": 4096}
    what = f"linattn, the portable form ({family})"
    return Peer(f"portable-{family}", what, lambda: partial(ours, backend="torch"), ours, {}, longest)


def _against_softmax(family: str, ratio: float) -> Peer:
    longest = {"forward": 16384, "forward+backward": 16384}
    what = f"torch scaled_dot_product_attention (causal; ours: {family})"
    return Peer(f"softmax-{family}", what, _softmax, FAMILIES[family], {("forward", 4096): ratio}, longest)


def state_space(x: dict[str, Tensor]) -> Tensor:
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
        return lambda x: run(x["v"], x["beta"], -torch.ones(8), x["k1"], x["q1"], 64)

    return load


def _token_loop() -> Run:
    """What one writes first: the recurrence as it stands in a paper."""

    def run(x: dict[str, Tensor]) -> Tensor:
        q, k, v, alpha = x["q"].float() * 64**-0.5, x["k"].float(), x["v"].float(), x["decay"].exp()
        state, outputs = v.new_zeros(1, 8, 64, 64), []
        for t in range(v.shape[1]):
            state = alpha[:, t, :, None, None] * state + k[:, t, :, :, None] * v[:, t, :, None, :]
            outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state))
        return torch.stack(outputs, 1).to(x["v"].dtype)

    return run


def _softmax() -> Run:
    def run(x: dict[str, Tensor]) -> Tensor:
        q, k, v = (x[name].transpose(1, 2) for name in "qkv")
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    return run


@cache
def all_peers() -> dict[str, Peer]:
    """By name. Version numbers are in the names: what is compared with does not change when something is upgraded."""
    import transformers

    logging.getLogger("transformers").setLevel(logging.ERROR)  # it warns that its own fallback runs: that is what we measure
    installed = transformers.__version__
    peers = [
        Peer("gated-delta", f"transformers {installed} torch_chunk_gated_delta_rule", _gated_delta, gated_delta,
             {("forward", 4096): 8.0, ("forward+backward", 4096): 4.0}, {"forward": 16384, "forward+backward": 16384}),
        Peer("kimi-delta", f"transformers {installed} chunk_kimi_delta_attention", _kimi_delta, kimi_delta,
             {("forward", 4096): 40.0}, {"forward": 16384, "forward+backward": 4096}),
        Peer("mamba2-5.17", "transformers 5.17.0 mamba2_chunk_scan", _state_space("5.17.0"), state_space,
             {("forward", 4096): 10.0}, {"forward": 4096, "forward+backward": 4096}),
        Peer("mamba2-5.23", "transformers 5.23.0 mamba2_chunk_scan", _state_space("5.23.0"), state_space,
             {("forward", 4096): 1.5}, {"forward": 16384, "forward+backward": 16384}),
        Peer("token-loop", "a loop over tokens with a decay per head", _token_loop, head,
             {("forward+backward", 4096): 50.0}, {"forward": 16384, "forward+backward": 4096}),
        Peer("softmax", "torch scaled_dot_product_attention (causal)", _softmax, head,
             {("forward", 4096): 15.0, ("forward", 16384): 15.0}, {"forward": 16384, "forward+backward": 16384}),
        *(_against_softmax(*pair) for pair in {"none": 15.0, "channel": 8.0, "gated-delta": 4.0, "kimi-delta": 4.0}.items()),
        *map(_portable, FAMILIES),
        Peer("per-head", "linattn, decay per head (ours: per channel; at least 1/3)", lambda: head, channel,
             {("forward", 4096): 1 / 3, ("forward+backward", 4096): 1 / 3}, {"forward": 16384, "forward+backward": 16384}),
    ]  # fmt: skip
    return {p.name: p for p in peers}
