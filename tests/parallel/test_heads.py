"""Parts of a mixer under tensor parallelism sum to the whole: every supported mixer, in one process."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from linattn import ffn, mixers
from linattn.mixers import Mixer
from linattn.parallel import heads

TOKENS, DIM = 7, 64
SHARED = [
    name
    for name in mixers.available()
    if (known := mixers.info(name)).cls.heads_apart is not None
    and (known.kind == "feed-forward" or (known.kind == "sequence" and known.resumable))
]
OPTIONS = {"groups": {"groups": 2, "head_dim": 16}}
OTHERS = [
    (
        "softmax",
        {"heads": 4, "kv_heads": 2, "gated": True, "bias": True, "out_bias": True, "norm_eps": 1e-6, "conv_width": 4, "head_dim": 24},
    ),
    ("softmax", {"window": 3}),
    ("gated_deltanet", {"heads": 2, "value_heads": 4, "key_size": 8, "value_size": 24}),
    ("gla", {"key_ratio": 1.0, "value_ratio": 2.0}),
    ("swiglu", {"hidden": 22}),
]


def error(got: Tensor, wanted: Tensor) -> float:
    return float((got - wanted).detach().norm() / wanted.detach().norm().clamp(min=1e-3))


def output(module: Mixer, x: Tensor) -> Tensor:
    y = module(x)
    return y[0] if isinstance(y, tuple) else y


def differences(whole: Mixer, options: dict, count: int) -> dict[str, float]:
    """Relative errors of the sum of all parts: output and gradients."""
    x = torch.randn(2, TOKENS, DIM, dtype=torch.float64, requires_grad=True)
    wanted = output(whole, x)
    weight = torch.randn_like(wanted)
    gradients = torch.autograd.grad((wanted * weight).sum(), [x, *whole.parameters()], allow_unused=True)
    parts = []
    for rank in range(count):
        own, cuts = heads.part(whole, options, count)
        heads.fill(own, dict(heads.tensors(whole)), cuts, rank, count)
        with torch.no_grad():
            for name, p in own.named_parameters():
                p.mul_(1 / count if cuts[name].once else 1)
        parts.append(own)
    got = sum(output(own, x) for own in parts)
    found = {"output": error(got, wanted)}
    (got * weight).sum().backward()
    found["gradient of x"] = error(x.grad, gradients[0])
    for (name, p), gradient in zip(whole.named_parameters(), gradients[1:], strict=True):
        own = [torch.zeros_like(q) if q.grad is None else q.grad for q in (part.get_parameter(name) for part in parts)]
        cut, full = cuts[name], torch.zeros_like(p) if gradient is None else gradient
        if cut.dim is None:
            found[name] = error(sum(own) / (count if cut.once else 1), full)
        for rank, g in enumerate(own if cut.dim is not None else []):
            found[f"{name} of {rank}"] = error(g, cut.take(full, rank, count))
    return found


@pytest.mark.parametrize("name", SHARED)
def test_parts_add_up(name: str) -> None:
    compared(name, OPTIONS["groups"] if "groups" in mixers.info(name).options else {})


@pytest.mark.parametrize(("name", "options"), OTHERS)
def test_parts_with_other_options_add_up(name: str, options: dict) -> None:
    compared(name, options)


def compared(name: str, options: dict) -> None:
    torch.manual_seed(0)
    whole = mixers.create(name, dim=DIM, **options).double()
    with torch.no_grad():
        for p in whole.parameters():  # equal biases and time constants would hide a wrong order
            p.add_(0.1 * torch.randn_like(p))
    assert heads.refusal(whole, options, 2) is None
    problems = {what: size for what, size in differences(whole, options, 2).items() if not size <= 1e-10}
    assert not problems


def test_the_known_ones_are_among_them() -> None:
    assert {"gla", "gated_deltanet", "kda", "mamba2", "softmax", "swiglu", "mlp", "linear_transformer"} <= set(SHARED)
    assert not {"retnet", "lstm", "slstm", "mamba", "rwkv7", "switch"} & set(SHARED)


def test_what_does_not_divide_is_refused() -> None:
    whole = mixers.create("gla", dim=DIM)
    assert heads.refusal(whole, {}, 3) == "its 4 heads are not a multiple of 3"
    assert heads.refusal(mixers.create("retnet", dim=DIM), {}, 2) == "its heads are not independent"
    assert heads.refusal(ffn.create("swiglu", DIM, 33), {"hidden": 33}, 2) == "its 33 hidden are not a multiple of 2"


def test_the_order_of_rows() -> None:
    """Sections of 4 and 2 rows over two processes: each has half of both."""
    cut = heads.Cut(0, (4, 2))
    assert cut.order(2).tolist() == [0, 1, 4, 2, 3, 5]
    assert heads.Cut(0, (4,)).order(2) is None and heads.Cut(1).order(2) is None
