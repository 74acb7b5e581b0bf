"""Memory-compressed attention against memory-compressed-attention with the same weights.

Compared without a mask: theirs is inverted, so that an all-true one hides every key but the learned one. Theirs scales by the root of
the whole width instead of a head's, so our queries are rescaled. It pads short sequences in front, we at the end, so lengths are
multiples of the rate; others are compared with a loop.
"""

import pytest
import torch

from linattn.mixers import create
from tests.oracles import wheels
from tests.oracles.compare import distance


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("length", [3, 30])
def test_wheel(causal, length):
    file = "memory_compressed_attention/memory_compressed_attention.py"
    theirs = wheels.module("memory-compressed-attention==0.0.7", file).MemoryCompressedAttention(32, heads=4, causal=causal).double()
    with torch.no_grad():
        theirs.null_k.normal_()
        theirs.null_v.normal_()
    ours = create("memory_compressed", dim=32, causal=causal).double()
    names = {"to_qkv": "qkv_proj", "to_out": "o_proj", "compress_fn.conv": "compress", "null_k": "null_key", "null_v": "null_value"}
    weights = {next(n + k.removeprefix(o) for o, n in names.items() if k.startswith(o)): t for k, t in theirs.state_dict().items()}
    weights = {k: t.flatten() if k.startswith("null") else t for k, t in weights.items()}
    weights["qkv_proj.weight"] = weights["qkv_proj.weight"].clone()
    weights["qkv_proj.weight"][:32] *= (8 / 32) ** 0.5
    ours.load_state_dict(weights)
    x = torch.randn(2, length, 32, dtype=torch.float64)
    assert distance(ours(x), theirs(x)) < 1e-12


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("length", [1, 2, 7, 11])
def test_loop(causal, length):
    ours = create("memory_compressed", dim=32, heads=2, causal=causal).double()
    with torch.no_grad():
        ours.null_key.normal_()
        ours.null_value.normal_()
    x = torch.randn(1, length, 32, dtype=torch.float64)
    q, k, v = ours.qkv_proj(x)[0].chunk(3, -1)
    slots = [(ours.null_key, ours.null_value, -1)]
    for start in range(0, length, 3):
        pair = []
        for t in (k, v):
            three = torch.zeros(3, 32, dtype=t.dtype)
            three[: len(t[start : start + 3])] = t[start : start + 3]
            pair.append(ours.compress(three.T[None])[0, :, 0])
        slots.append((*pair, start + 2))
    out = []
    for t in range(length):
        seen = [(a, b) for a, b, last in slots if last <= t or not causal]
        heads = []
        for h in range(2):
            part = slice(16 * h, 16 * h + 16)
            weights = torch.stack([q[t, part] @ a[part] for a, _ in seen]).div(4).softmax(0)
            heads.append(sum(w * b[part] for w, (_, b) in zip(weights, seen, strict=True)))
        out.append(torch.cat(heads))
    assert distance(ours(x)[0], ours.o_proj(torch.stack(out))) < 1e-12
