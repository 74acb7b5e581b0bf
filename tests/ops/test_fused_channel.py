"""The chunk algorithm of linattn/ops/triton/hopper/fused_channel.py in operations of torch, in float64, against the definition."""

import math

import pytest
import torch
from torch import Tensor

from tests.ops.cases import cotangent, gradients, make
from tests.ops.errors import error

C, LEAST = 64, -1.875


def settled_chunk(q, k, v, do, x, scale, s, ds):
    """Gradients of a chunk from Q̂ and K̂, and the cotangent of the state before it; ``x`` [C, K] sums log decays up to each token."""
    h = (x[-1] / 2).exp()
    e = x.exp() / h
    q_hat, k_hat = scale * e * q, k / e
    p, g = (q_hat @ k_hat.mT).tril(), (do @ v.mT).tril()
    low = h[:, None] * ds
    dv = k_hat @ low + p.mT @ do
    before = h[:, None] * (low + q_hat.mT @ do)
    dq_hat = h * (do @ s.mT) + g @ k_hat
    dk_hat = v @ low.mT + g.mT @ q_hat
    across = q_hat * dq_hat - k_hat * dk_hat
    after = ((h[:, None] * s + k_hat.mT @ v) * low).sum(1)
    return dq_hat * scale * e, dk_hat / e, dv, across.flip(0).cumsum(0).flip(0) + after, before


def other_chunk(q, k, v, do, x, scale, s, ds):
    """The same for any decays: every pair of tokens with its own weight, as the level kernels multiply them."""
    faded = scale * q * x.exp(), k * (x[-1] - x).exp()
    below = torch.ones(len(q), len(q), dtype=torch.bool).tril()[..., None]
    weight = torch.where(below, x[:, None] - x[None, :], -torch.inf).exp() * scale
    pairs = q[:, None] * k[None, :] * weight
    dv = faded[1] @ ds + pairs.sum(-1).mT @ do
    before = x[-1].exp()[:, None] * ds + faded[0].mT @ do
    g = (do @ v.mT)[..., None] * weight
    dq = scale * x.exp() * (do @ s.mT) + (g * k[None, :]).sum(1)
    dk = (x[-1] - x).exp() * (v @ ds.mT) + (g * q[:, None]).sum(0)
    state = ((x[-1].exp()[:, None] * s + faded[1].mT @ v) * ds).sum(1)
    return dq, dk, dv, (q * dq - k * dk).flip(0).cumsum(0).flip(0) + state, before


def backward(q, k, v, decay, do, scale, s, ds) -> tuple[dict[str, Tensor], list[bool]]:
    """Gradients of one head [T, K or V], and which chunks settled, from the state before and the cotangent of the one after it."""
    spans = [slice(a, a + C) for a in range(0, len(q), C)]
    sums = [decay[span].cumsum(0) for span in spans]
    states = [s]
    for span, x in zip(spans[:-1], sums[:-1], strict=True):
        states.append(x[-1].exp()[:, None] * states[-1] + (k[span] * (x[-1] - x).exp()).mT @ v[span])
    found, settles = [], []
    for span, x, state in zip(spans[::-1], sums[::-1], states[::-1], strict=True):
        settles.append(bool(x[-1].min() / math.log(2) >= LEAST * len(x)))
        chunk = settled_chunk if settles[-1] else other_chunk
        *each, ds = chunk(q[span], k[span], v[span], do[span], x, scale, state, ds)
        found.append(each)
    names = ("q", "k", "v", "decay")
    return {name: torch.cat([each[n] for each in found[::-1]]) for n, name in enumerate(names)} | {"S": ds}, settles


@pytest.mark.parametrize(("strength", "kinds"), [(0.5, {True}), (2.0, {True, False}), (8.0, {False})])
def test_a_scan_that_finishes_chunks_that_settle_has_the_gradients_of_the_definition(strength, kinds):
    call = make("plain", "BTHK", B=1, T=5 * C + 40, H=1, K=4, V=5, strength=(0.8 * strength, 1.2 * strength))
    odd = torch.arange(call.tensors["decay"].shape[1]) // C % 2 == 1
    call = call.with_(decay=torch.where(odd[None, :, None, None], 0.5, 1.0) * call.tensors["decay"])
    out, wanted = gradients(call, backend="reference")
    q, k, v, decay = (call.tensors[name][0, :, 0] for name in ("q", "k", "v", "decay"))
    do, ds, s = cotangent(out["o"])[0, :, 0], cotangent(out["S"])[0, 0], call.tensors["S"][0, 0]
    found, settles = backward(q, k, v, decay, do, q.shape[1] ** -0.5, s, ds)
    assert set(settles) == kinds
    for name, x in found.items():
        assert error(x, wanted[name][0, 0] if name == "S" else wanted[name][0, :, 0]) < 1e-12, name
