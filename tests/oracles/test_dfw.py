"""Decaying fast weights against the paper's recurrence; and its operation, where the quadratic form overflows."""

import pytest
import torch

from linattn.mixers import create
from linattn.ops.outer_decay import outer_decay
from tests.oracles.compare import distance


def loop(q, k, v, a, b, s=None):
    """S_t = (α_tᵀ β_t) ⊙ S_{t-1} + k_tᵀ v_t, o_t = q_t S_t; every argument [B, T, H, ...], gates as factors."""
    s, outputs = q.new_zeros(*q.shape[:1], q.shape[2], q.shape[3], v.shape[3]) if s is None else s, []
    for t in range(q.shape[1]):
        s = a[:, t, :, :, None] * b[:, t, :, None] * s + k[:, t, :, :, None] * v[:, t, :, None]
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], s))
    return torch.stack(outputs, 1), s


def test_the_block():
    mixer = create("dfw", dim=64).double()
    x = 3 * torch.randn(2, 75, 64, dtype=torch.float64, requires_grad=True)
    gates = (torch.sigmoid(x @ p.weight.T + p.bias).unflatten(-1, (4, 16)) for p in (mixer.a_proj, mixer.b_proj))
    qkv = ((x @ p.weight.T).unflatten(-1, (4, 16)) for p in (mixer.q_proj, mixer.k_proj, mixer.v_proj))
    o, last = loop(*qkv, *gates)
    y, state = mixer(x, return_state=True)
    wanted = o.flatten(-2) @ mixer.o_proj.weight.T
    assert distance(y, wanted) < 1e-12
    assert distance(state["S"], last) < 1e-12
    found = [torch.autograd.grad(t.pow(3).sum(), (x, *mixer.parameters())) for t in (y, wanted)]
    assert all(distance(g, w) < 1e-11 for g, w in zip(*found, strict=True))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("strength", [1e-4, 0.1, 30.0])
def test_the_operation(dtype, tolerance, strength):
    """Head sizes of no power of two, a first state, many chunks; e^{-30} a token lets the quadratic form overflow at once."""
    q, k, a = (torch.randn(2, 300, 3, 5, dtype=dtype) for _ in range(3))
    v, b = (torch.randn(2, 300, 3, 7, dtype=dtype) for _ in range(2))
    a, b = -strength * a.abs(), -strength * b.abs()
    inputs = [t.requires_grad_() for t in (q, k, v, a, b, torch.randn(2, 3, 5, 7, dtype=dtype))]
    o, s = outer_decay(*inputs[:5], scale=1.0, initial_state=inputs[5], return_state=True)
    exact = [t.detach().double().requires_grad_() for t in inputs]
    wanted, last = loop(*exact[:3], exact[3].exp(), exact[4].exp(), exact[5])
    assert distance(o, wanted) < tolerance
    assert distance(s, last) < tolerance
    got = torch.autograd.grad(o.pow(2).sum() + s.sum(), inputs)
    theirs = torch.autograd.grad(wanted.pow(2).sum() + last.sum(), exact)
    assert all(distance(g, w) < tolerance for g, w in zip(got, theirs, strict=True))


def test_resets_and_packed_sequences():
    """-inf in either decay resets its rows or columns: earlier tokens change no bit after it, as at the start of a sequence."""
    q, k, v = (torch.randn(1, 90, 2, 4) for _ in range(3))
    a, b = (-torch.rand(1, 90, 2, 4) for _ in range(2))
    a[:, 37] = -torch.inf
    b[:, 60, :, 1] = -torch.inf
    o = outer_decay(q, k, v, a, b)
    assert o.isfinite().all()
    changed = v.clone()
    changed[:, :37] = 1e4
    assert torch.equal(outer_decay(q, k, changed, a, b)[:, 37:], o[:, 37:])
    changed[:, :37], changed[:, 37:60, :, 1] = v[:, :37], 1e4
    assert torch.equal(outer_decay(q, k, changed, a, b)[:, 60:], o[:, 60:])
    cu = torch.tensor([0, 37, 37, 90])
    packed, s = outer_decay(q, k, v, a, b, cu_seqlens=cu, return_state=True)
    assert distance(packed, o) < 1e-6
    assert s.shape == (3, 2, 4, 4) and not s[1].any()
    alone, last = outer_decay(*(t[:, 37:] for t in (q, k, v, a, b)), return_state=True)
    assert distance(packed[:, 37:], alone) < 1e-6 and distance(s[2:], last) < 1e-6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"value_decay": torch.zeros(1, 3, 2, 4)}, r"value_decay must have shape \[B, T, H, V\] = \[1, 3, 2, 5\]"),
        ({"value_decay": torch.ones(1, 3, 2, 5)}, "value_decay is the natural logarithm"),
        ({"key_decay": torch.ones(1, 3, 2, 4)}, "key_decay is the natural logarithm"),
        ({"key_decay": torch.zeros(1, 3, 2)}, r"key_decay must have shape \[B, T, H, K\]"),
        ({"v": torch.zeros(1, 3, 4, 5), "value_decay": torch.zeros(1, 3, 4, 5), "key_decay": torch.zeros(1, 3, 4, 4)}, "as many heads"),
        ({"value_decay": torch.zeros(1, 3, 2, 5, dtype=torch.float16)}, "value_decay must be torch.float32"),
    ],
)
def test_refusals(change, message):
    given = {"q": torch.zeros(1, 3, 2, 4), "k": torch.zeros(1, 3, 2, 4), "v": torch.zeros(1, 3, 2, 5)}
    given |= {"key_decay": torch.zeros(1, 3, 2, 4), "value_decay": torch.zeros(1, 3, 2, 5)}
    with pytest.raises(ValueError, match=message):
        outer_decay(**(given | change))
