"""A mixture of experts against every expert on every token, and refusals."""

import pytest
import torch
import torch.nn.functional as F

from linattn import ffn


def dense(m, x, active):
    """All experts for all tokens, weighed by 0 where they were not chosen."""
    logits = x @ m.router.weight.T
    scores = logits.sigmoid() if m.scores == "sigmoid" else logits.softmax(-1)
    ranked = scores + m.score_bias if m.scores == "sigmoid" else scores
    chosen = ranked >= ranked.sort(-1, descending=True)[0][..., active - 1 : active]
    weights = torch.where(chosen, scores, 0.0)
    weights = m.scale * (weights / weights.sum(-1, keepdim=True) if m.renormalize else weights)
    each = torch.stack([(F.silu(x @ g.T) * (x @ u.T)) @ d.T for g, u, d in zip(m.gate_proj, m.up_proj, m.down_proj, strict=True)], -1)
    y = (each * weights[..., None, :]).sum(-1)
    if m.shared is not None:
        y = y + m.shared(x) * (1 if m.shared_gate is None else (x @ m.shared_gate.weight.T).sigmoid())
    return y


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"renormalize": False, "shared": 12, "shared_gate": True},
        {"scores": "sigmoid", "scale": 2.5, "shared": 20, "active": 3},
        {"active": 5},
    ],
)
def test_values_and_gradients(options):
    torch.manual_seed(0)
    m = ffn.create("experts", 16, 24, **{"count": 5, **options}).double()
    if m.scores == "sigmoid":
        torch.nn.init.normal_(m.score_bias, std=0.3)
    x = torch.randn(2, 19, 16, dtype=torch.float64, requires_grad=True)
    y, wanted = m(x), dense(m, x, options.get("active", 2))
    torch.testing.assert_close(y, wanted)
    for a, b in zip(*(torch.autograd.grad(o.square().sum(), [x, *m.parameters()]) for o in (y, wanted)), strict=True):
        torch.testing.assert_close(a, b)


def test_no_tokens():
    assert ffn.create("experts", 16, 24)(torch.zeros(2, 0, 16)).shape == (2, 0, 16)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"active": 9}, "active must be from 1 to count = 8, but came as 9"),
        ({"scores": "relu"}, "scores must be one of 'softmax', 'sigmoid'"),
        ({"shared_gate": True}, "but shared is 0"),
    ],
)
def test_refused(options, message):
    with pytest.raises(ValueError, match=message):
        ffn.create("experts", 16, **options)


def test_geglu():
    m, x = ffn.create("geglu", 8, bias=True), torch.randn(3, 8)
    assert m.up_proj.out_features == 24
    wanted = m.down_proj(F.gelu(m.gate_proj(x), approximate="tanh") * m.up_proj(x))
    torch.testing.assert_close(m(x), wanted)


@pytest.mark.parametrize("hidden", [0, -4, 1.5, "64"])
@pytest.mark.parametrize("name", ["swiglu", "experts"])
def test_an_inner_width_that_is_none_is_refused(name, hidden):
    with pytest.raises(ValueError, match="hidden must be an integer of at least 1, but came as"):
        ffn.create(name, 32, hidden)
