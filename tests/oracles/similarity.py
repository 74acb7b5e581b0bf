"""Shared by tests of kernel attention: the quadratic formula."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from linattn.mixers import Mixer


def projected(mixer: Mixer, x: Tensor) -> list[Tensor]:
    """q, k, v [B, H, T, ...] by the mixer's own linear maps."""
    return [p(x).unflatten(-1, (mixer.heads, -1)).transpose(1, 2) for p in (mixer.q_proj, mixer.k_proj, mixer.v_proj)]


def merged(mixer: Mixer, o: Tensor) -> Tensor:
    """From [B, H, T, V] to the mixer's output [B, T, D]."""
    return mixer.o_proj(o.transpose(1, 2).flatten(-2))


def quadratic(mixer: Mixer, similarity: Tensor, v: Tensor, guard: Callable[[Tensor], Tensor]) -> Tensor:
    """The output by the matrix of similarities [B, H, T, T], rows divided by their guarded sum."""
    similarity = similarity.tril() if mixer.causal else similarity
    return merged(mixer, similarity @ v / guard(similarity.sum(-1, keepdim=True)))


def assert_forms(mixer: Mixer, x: Tensor) -> None:
    """Every form of the recurrence, and steps, give the same numbers."""
    outputs = []
    for form in ("parallel", "chunk", "recurrent"):
        mixer.form = form
        outputs.append(mixer(x))
    state, steps = None, []
    for t in range(x.shape[1]):
        y, state = mixer(x[:, t : t + 1], state, return_state=True)
        steps.append(y)
    for o in outputs:
        torch.testing.assert_close(o, torch.cat(steps, 1), rtol=1e-9, atol=1e-11)


def assert_bidirectional(mixer: Mixer, x: Tensor) -> None:
    """Assert that without causality padding and packing change nothing, rows and sequences are independent, and a state is refused."""
    y, lengths = mixer(x), [x.shape[1] - 5, 5]
    mask = torch.arange(x.shape[1]) >= 5
    padded = mixer(x, mask=mask.expand(x.shape[:2]))
    torch.testing.assert_close(padded[:, 5:], mixer(x[:, 5:]), rtol=1e-9, atol=1e-11)
    assert not padded[:, :5].any()
    ends = torch.tensor([0, lengths[0], lengths[0], x.shape[1]])  # the second sequence is empty
    packed = mixer(x[:1], cu_seqlens=ends)
    apart = torch.cat([mixer(part) for part in x[:1].split(lengths, 1)], 1)
    torch.testing.assert_close(packed, apart, rtol=1e-9, atol=1e-11)
    assert (y[:, 0] - mixer(x[:, :1])[:, 0]).abs().max() > 1e-6, "the first token reads no later one"
    with pytest.raises(ValueError, match="causal=False has no state"):
        mixer(x, return_state=True)
    with pytest.raises(ValueError, match="causal=False has no state"):
        mixer(x, {"S": x, "z": x, "position": torch.zeros(len(x)).long()})
