"""Valid calls of the ops, from which :mod:`tests.fuzz.calls` makes wrong ones."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st

import linattn
from linattn.ops import pattern
from tests.fuzz.values import Draw, integers, tensor

FLOATS = st.sampled_from([torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float16])
BACKENDS = st.sampled_from(["auto", "auto", "auto", "torch", "cpu", "reference"])
FORMS = st.sampled_from(["auto", "auto", "chunk", "recurrent", "parallel"])


def linear_attention(draw: Draw) -> tuple[Any, dict[str, Any]]:
    batch, tokens, heads, size, width = (draw(st.integers(1, n)) for n in (2, 5, 2, 4, 4))
    dtype = draw(FLOATS)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    given: dict[str, Any] = {
        "q": tensor(draw, batch, tokens, heads, size, dtype=dtype),
        "k": tensor(draw, batch, tokens, heads, size, dtype=dtype),
        "v": tensor(draw, batch, tokens, heads, width, dtype=dtype),
    }
    rule = draw(st.sampled_from(["plain", "beta", "erase", "bonus", "normalize"]))
    rank = draw(st.sampled_from([None, (heads,), (heads, size), (batch, tokens, heads), (batch, tokens, heads, size)]))
    if rank is not None:
        given["decay"] = tensor(draw, *rank, dtype=wide, low=-3.0, high=0.0)
    if rule == "beta":
        given["beta"] = tensor(draw, batch, tokens, heads, dtype=dtype, low=0.0)
    elif rule == "erase":
        given["erase"] = tuple(tensor(draw, batch, tokens, heads, size, dtype=dtype) for _ in range(2))
    elif rule == "bonus":
        given["bonus"] = tensor(draw, heads, size, dtype=dtype)
    elif rule == "normalize":
        given["normalize"] = draw(st.sampled_from([True, 0.5, "return"]))
    if draw(st.booleans()):
        state = tensor(draw, batch, heads, size, width, dtype=wide)
        given["initial_state"] = (state, tensor(draw, batch, heads, size, dtype=wide)) if rule == "normalize" else state
    return linattn.linear_attention, given | _common(draw, batch, tokens) | {
        "form": draw(FORMS),
        "scale": draw(st.sampled_from([None, 1.0])),
    }


def _common(draw: Draw, batch: int, tokens: int) -> dict[str, Any]:
    given: dict[str, Any] = {"return_state": draw(st.booleans()), "backend": draw(BACKENDS)}
    if batch == 1 and draw(st.booleans()):
        given["cu_seqlens"] = torch.tensor([0, tokens])
    return given


def diagonal_scan(draw: Draw) -> tuple[Any, dict[str, Any]]:
    batch, tokens, width = (draw(st.integers(1, n)) for n in (2, 5, 4))
    decay = tensor(draw, batch, tokens, width, low=-3.0, high=0.0) if draw(st.booleans()) else tensor(draw, width, low=-3.0, high=0.0)
    decay = torch.complex(decay, tensor(draw, *decay.shape)) if draw(st.integers(0, 3)) == 0 else decay
    given = {"decay": decay, "b": tensor(draw, batch, tokens, width)}
    if draw(st.booleans()):
        given["initial_state"] = tensor(draw, batch, width, dtype=decay.dtype)
    return linattn.diagonal_scan, given | _common(draw, batch, tokens)


def running_max(draw: Draw) -> tuple[Any, dict[str, Any]]:
    batch, tokens, width = (draw(st.integers(1, n)) for n in (2, 5, 4))
    given = {"decay": tensor(draw, batch, tokens, width, low=-3.0, high=0.0), "gate": tensor(draw, batch, tokens, width)}
    if draw(st.booleans()):
        given["initial_state"] = tensor(draw, batch, width)
    return linattn.running_max, given | _common(draw, batch, tokens)


def selective_scan(draw: Draw) -> tuple[Any, dict[str, Any]]:
    batch, tokens, width, size = (draw(st.integers(1, n)) for n in (2, 5, 4, 3))
    dtype = draw(FLOATS)
    given = {
        "x": tensor(draw, batch, tokens, width, dtype=dtype),
        "dt": tensor(draw, batch, tokens, width, dtype=dtype, low=0.0),
        "A": tensor(draw, width, size, dtype=dtype, low=-1.0, high=0.0),
        "B": tensor(draw, batch, tokens, size, dtype=dtype),
        "C": tensor(draw, batch, tokens, size, dtype=dtype),
        "D": tensor(draw, width, dtype=dtype) if draw(st.booleans()) else None,
        "bias": tensor(draw, width, dtype=dtype) if draw(st.booleans()) else None,
        "softplus": draw(st.booleans()),
        "z": tensor(draw, batch, tokens, width, dtype=dtype) if draw(st.booleans()) else None,
    }
    given["softplus"] = given["softplus"] or given["bias"] is not None
    return linattn.selective_scan, given | _common(draw, batch, tokens)


def long_conv(draw: Draw) -> tuple[Any, dict[str, Any]]:
    batch, tokens, width = (draw(st.integers(1, n)) for n in (2, 5, 4))
    return linattn.long_conv, {"u": tensor(draw, batch, tokens, width), "kernel": tensor(draw, draw(st.integers(1, 6)), width)}


def lti(draw: Draw) -> tuple[Any, dict[str, Any]]:
    batch, tokens, width, size = (draw(st.integers(1, n)) for n in (2, 5, 3, 3))
    given: dict[str, Any] = {
        "u": tensor(draw, batch, tokens, width),
        "A": tensor(draw, width, size, low=-2.0, high=0.0) if draw(st.booleans()) else 0.5 * tensor(draw, width, size, size),
        "B": tensor(draw, width, size),
        "C": tensor(draw, width, size),
        "return_state": draw(st.booleans()),
    }
    if draw(st.booleans()):
        given["initial_state"] = tensor(draw, batch, width, size)
    if batch == 1 and draw(st.booleans()):
        given["cu_seqlens"] = torch.tensor([0, tokens])
    elif draw(st.booleans()):
        given["lengths"] = torch.full((batch,), tokens)
    return linattn.lti, given


def pattern_attention(draw: Draw) -> tuple[Any, dict[str, Any]]:
    batch, tokens, heads, size = (draw(st.integers(1, n)) for n in (2, 5, 2, 4))
    q, k, v = (tensor(draw, batch, tokens, heads, size) for _ in "qkv")
    seen = draw(st.sampled_from([pattern.causal(), pattern.local(2), pattern.strided(2), pattern.blocks(2), pattern.global_tokens(1)]))
    given: dict[str, Any] = {"q": q, "k": k, "v": v, "pattern": seen, "backend": draw(st.sampled_from(["auto", "tiles", "dense"]))}
    if draw(st.booleans()):
        given["lengths"] = torch.full((batch,), tokens)
    return linattn.ops.pattern_attention, given


def patterns(draw: Draw) -> tuple[Any, dict[str, Any]]:
    return draw(
        st.sampled_from(
            [
                (pattern.local, {"before": 2, "after": 1, "dilation": 1}),
                (pattern.strided, {"stride": 2}),
                (pattern.summaries, {"size": 4, "last": 1}),
                (pattern.blocks, {"size": 4, "before": 1, "after": 0, "shift": 2}),
                (pattern.global_tokens, {"count": 2}),
            ]
        )
    )


def explain(draw: Draw) -> tuple[Any, dict[str, Any]]:
    op, given = draw(st.sampled_from([linear_attention, diagonal_scan, running_max, selective_scan]))(draw)

    def explained(**arguments: Any) -> None:
        linattn.explain(*(() if op is linattn.linear_attention else (op,)), **arguments)

    return explained, given


def decode(draw: Draw) -> tuple[Any, dict[str, Any]]:
    logits = tensor(draw, 2, 7, low=-5.0, high=5.0)
    from linattn import generate

    sampling = generate.Sampling(draw(st.sampled_from([0.0, 0.8])), draw(st.sampled_from([None, 3])), draw(st.sampled_from([None, 0.9])))
    if sampling.temperature and draw(st.booleans()):
        return generate.probabilities, {"logits": logits, "sampling": sampling}
    return generate.sample, {"logits": logits, "sampling": sampling, "generator": None}


def ids(draw: Draw, *shape: int, vocab: int = 20) -> torch.Tensor:
    return integers(draw, 0, vocab, *shape)
