"""Product-key memory against the wheel with the same weights, and against a search of all n² keys."""

import pytest
import torch

from linattn import ffn
from tests.oracles import standins
from tests.oracles.compare import distance


def every_key(m, x):
    """Exhaustive search over all keys of every head."""
    q = m.q_proj(x).unflatten(-1, (2, m.heads, -1))
    q = m.q_norm(q.flatten(0, -2)).view(q.shape)
    y = torch.zeros_like(x)
    for h in range(m.heads):
        keys = torch.stack([torch.cat([a, b]) for a in m.keys[h, :, 0] for b in m.keys[h, :, 1]])  # [n², 2 K]
        scores, best = (torch.cat([q[..., 0, h, :], q[..., 1, h, :]], -1) @ keys.T).topk(m.active, -1)
        y = y + (scores.softmax(-1)[..., None] * m.values[best]).sum(-2)
    return y


@pytest.mark.parametrize("options", [{}, {"norm": "none"}, {"heads": 1, "active": 9}])
def test_every_key(options):
    torch.manual_seed(0)
    m = ffn.create("product_key_memory", 16, 81, **{"heads": 3, "active": 4, "key_dim": 5, **options}).double()
    x = torch.randn(2, 7, 16, dtype=torch.float64, requires_grad=True)
    y, wanted = m(x), every_key(m, x)
    assert distance(y, wanted) < 1e-12
    for a, b in zip(*(torch.autograd.grad(t.square().sum(), [x, *m.parameters()]) for t in (y, wanted)), strict=True):
        assert distance(a, b) < 1e-11


@pytest.mark.parametrize("norm", ["layer", "batch"])
@pytest.mark.parametrize("training", [True, False])
def test_wheel(norm, training):
    torch.manual_seed(0)
    ours = ffn.create("product_key_memory", 32, 256, heads=2, active=8, key_dim=12, norm=norm).double()
    module = standins.module("product-key-memory==0.3.0", "product_key_memory/product_key_memory.py", colt5_attention="topk")
    theirs = module.PKM(32, heads=2, num_keys=16, topk=8, dim_head=12, use_layernorm=norm == "layer").double()
    names = {"q_proj.": "to_queries.", "q_norm.": "norm." if norm == "layer" else "norm.fn.", "values": "values.weight"}
    weights = ours.state_dict()
    for old, new in names.items():
        weights = {name.replace(old, new): t for name, t in weights.items()}
    theirs.load_state_dict(weights)
    ours.train(training), theirs.train(training)
    x = torch.randn(3, 11, 32, dtype=torch.float64)
    runs = []
    mask = torch.ones(3 * 2 * 2, 11, dtype=torch.bool)  # without one their batch norm treats tokens as channels and fails
    for m, how in ((ours, {}), (theirs, {"input_mask": mask} if norm == "batch" else {})):
        leaf = x.clone().requires_grad_()
        y = m(leaf, **how)
        values = m.values if isinstance(m.values, torch.Tensor) else m.values.weight
        runs.append([y, *torch.autograd.grad(y.square().sum(), [leaf, m.keys, values])])
    for a, b in zip(*runs, strict=True):
        assert distance(a, b) < 1e-12


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hidden": 80}, "hidden must be the number of values, the square of that of the keys, but came as 80"),
        ({"hidden": 16, "active": 5}, "active must be from 1 to the 4 keys"),
        ({"norm": "rms"}, "norm must be one of"),
    ],
)
def test_refused(options, message):
    with pytest.raises(ValueError, match=message):
        ffn.create("product_key_memory", 16, **options)


def test_values_that_do_not_fit_are_refused_before_the_keys_are_made(monkeypatch):
    """10^6 keys for each half would take 8 GB and a minute before the 10^12 values fail."""
    monkeypatch.setattr(torch, "randn", lambda *_: pytest.fail("keys were made"))
    with pytest.raises(ValueError, match="need more memory than there is"):
        ffn.create("product_key_memory", dim=32, hidden=10**12)
