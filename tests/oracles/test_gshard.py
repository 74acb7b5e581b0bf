"""GShard against its definition token by token, and against mixture-of-experts with the same weights."""

import pytest
import torch

from linattn import ffn
from tests.oracles import wheels
from tests.oracles.compare import distance
from tests.oracles.mixtures import assert_loop, assert_same, uneven


@pytest.mark.parametrize("options", [{}, {"capacity": 1.0, "z": 1e-3}, {"capacity": 0.3}, {"count": 2}])
def test_definition(options):
    m = uneven("gshard", **options)
    capacity = {1.0: 3, 0.3: 1}.get(options.get("capacity"), 20 if "count" in options else 5)  # of 20 tokens
    assert m.expert_capacity(20) == capacity
    assert_loop(m, torch.randn(2, 20, 16, dtype=torch.float64), capacity)


@pytest.mark.parametrize("training", [True, False])
def test_wheel(training):
    """Some choices exceed the capacity on both sides; their balancing loss is E² times the mean of the shares' products, like ours."""
    ours = uneven("gshard", capacity=1.25, eval_capacity=2.0).train(training)
    theirs = wheels.module("mixture-of-experts==0.2.3", "mixture_of_experts/mixture_of_experts.py").MoE(
        16, num_experts=8, hidden_dim=24, second_policy_train="all", second_policy_eval="all"
    )
    theirs = theirs.double().train(training)
    theirs.load_state_dict({"gate.w_gating": ours.router.weight.T, "experts.w1": ours.up_proj.mT, "experts.w2": ours.down_proj.mT})
    x = torch.randn(3, 64, 16, dtype=torch.float64)
    inputs = x.clone().requires_grad_(), x.clone().requires_grad_()
    with ffn.reports() as told:
        y = ours(inputs[0])
    assert told[0].counts["refused"] > 0
    wanted, loss = theirs(inputs[1])
    leaves = ([inputs[0], ours.router.weight.T, ours.up_proj.mT], [inputs[1], theirs.gate.w_gating, theirs.experts.w1])
    del leaves[0][1:], leaves[1][1:]
    assert_same(
        [y, told[0].losses["balance"]], [wanted, loss], leaves, 1e-6
    )  # theirs divides by the gates + 1e-9, and has masks in float32


def test_the_second_expert_by_chance():
    """A second choice of weight g is kept with probability g / threshold, a first one always; in evaluation all are."""
    m = uneven("gshard", threshold=0.5, capacity=None)
    gates = torch.tensor([[[0.9, 0.1], [0.6, 0.4]]], dtype=torch.float64)
    torch.manual_seed(0)
    found = torch.stack([m.wanted(gates) for _ in range(4000)]).double().mean(0)[0]
    assert (found[:, 0] == 1).all()
    assert (found[:, 1] - torch.tensor([0.2, 0.8])).abs().max() < 0.03
    x = torch.randn(1, 50, 16, dtype=torch.float64)
    left_out = m(x)
    m.eval()
    assert m.wanted(gates).all() and distance(m(x), left_out) > 1e-3
