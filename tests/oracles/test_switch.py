"""Switch against its definition token by token, and against transformers."""

import pytest
import torch
from transformers.models.switch_transformers import modeling_switch_transformers as theirs

from linattn import ffn
from tests.oracles.compare import distance
from tests.oracles.mixtures import assert_loop, assert_same, uneven


@pytest.mark.parametrize("options", [{}, {"capacity": 0.3}, {"capacity": 1.0, "z": 1e-3}, {"capacity": 8.0}, {"count": 3}])
def test_definition(options):
    m = uneven("switch", **options)
    capacity = {0.3: 1, 1.0: 3, 8.0: 20}.get(options.get("capacity"), 9 if "count" in options else 4)  # of 20 tokens
    assert m.expert_capacity(20) == capacity
    assert_loop(m, torch.randn(2, 20, 16, dtype=torch.float64), capacity)


def block(m, capacity):
    config = theirs.SwitchTransformersConfig(
        d_model=16, d_ff=24, num_experts=m.count, expert_capacity=capacity, dropout_rate=0.0, router_jitter_noise=0.0,
        dense_act_fn="relu",
    )  # fmt: skip
    block = theirs.SwitchTransformersSparseMLP(config).double()
    block.router.dtype = torch.float64
    names = {"router.classifier.weight": m.router.weight}
    for e in range(m.count):
        names |= {f"experts.expert_{e}.wi.weight": m.up_proj[e], f"experts.expert_{e}.wo.weight": m.down_proj[e]}
    block.load_state_dict(names)
    return block


@pytest.mark.parametrize("capacity", [20, 4])
def test_transformers(capacity):
    """With capacity for all in every version; with less in versions that drop tokens: up to 5.17 none did."""
    m = uneven("switch")
    other, x = block(m, capacity), torch.randn(2, 20, 16, dtype=torch.float64)
    if capacity == 20:
        m.eval()
    elif not (other(x) == 0).all(-1).any():
        pytest.skip("this version of transformers drops no tokens")
    inputs = x.clone().requires_grad_(), x.clone().requires_grad_()
    experts = [getattr(other.experts, f"expert_{e}") for e in range(m.count)]
    y, wanted = m(inputs[0]), other(inputs[1])
    assert_same([y], [wanted], ([inputs[0], m.router.weight], [inputs[1], other.router.classifier.weight]))
    (ours,) = torch.autograd.grad(m(x).sum(), m.down_proj)
    other(x).sum().backward()
    grads = [torch.zeros_like(e.wo.weight) if e.wo.weight.grad is None else e.wo.weight.grad for e in experts]
    assert distance(ours, torch.stack(grads)) < 1e-12


def test_losses_of_transformers():
    m, x = uneven("switch", balance=0.5, z=0.25), torch.randn(3, 20, 16, dtype=torch.float64)
    with ffn.reports() as told:
        m(x)
    logits = m.logits(x)
    probabilities = logits.softmax(-1)
    balance, z = told[0].losses["balance"], told[0].losses["z"]
    assert distance(balance, 0.5 * theirs.load_balancing_loss_func(probabilities, probabilities.argmax(-1))) < 1e-7  # theirs in float32
    assert distance(z, 0.25 * theirs.router_z_loss_func(logits)) < 1e-12


def test_jitter():
    """In training only the router sees jittered tokens; in evaluation it does not."""
    m, x = uneven("switch", jitter=0.5, capacity=None), torch.randn(1, 20, 16, dtype=torch.float64)
    assert distance(m(x), m(x)) > 1e-3
    m.eval()
    assert distance(m(x), uneven("switch").eval()(x)) < 1e-12
