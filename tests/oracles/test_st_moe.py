"""ST-MoE against its definition token by token, and against st-moe-pytorch with the same weights."""

import pytest
import torch
import torch.nn.functional as F

from linattn import ffn
from tests.oracles import standins
from tests.oracles.compare import distance
from tests.oracles.mixtures import assert_loop, assert_same, uneven


@pytest.mark.parametrize("options", [{}, {"capacity": 2.0, "z": 0.0}, {"count": 5, "balance": 0.0}])
def test_definition(options):
    m = uneven("st_moe", **options)
    capacity = {2.0: 5}.get(options.get("capacity"), 5 if "count" in options else 4)  # of 20 tokens
    assert m.expert_capacity(20) == capacity
    assert_loop(m, torch.randn(2, 20, 16, dtype=torch.float64), capacity)


def wheel(ours):
    """Their mixture with our weights: no biases, all second choices kept, and no gradient through the dispatch."""
    module = standins.module(
        "st-moe-pytorch==0.1.8", "st_moe_pytorch/st_moe_pytorch.py", beartype="beartype", colt5_attention="topk",
        st_moe_pytorch__distributed="AllGather split_by_rank gather_sizes pad_dim_to has_only_one_value",
    )  # fmt: skip
    module.maybe_differentiable_topk = lambda t, k, **_: t.topk(k)
    theirs = module.MoE(16, num_experts=8, expert_hidden_mult=2.3, threshold_train=1e-9, threshold_eval=1e-9,
                        straight_through_dispatch_tensor=False).double()  # fmt: skip
    with torch.no_grad():
        theirs.gate.to_gates.weight.copy_(ours.router.weight)
        for e, expert in enumerate(theirs.experts.experts):
            expert.net[0].weight.copy_(torch.cat([ours.up_proj[e], ours.gate_proj[e]]))
            expert.net[2].weight.copy_(ours.down_proj[e])
            for layer in (expert.net[0], expert.net[2]):
                layer.bias.zero_()
    return theirs


@pytest.mark.parametrize("training", [True, False])
def test_wheel(training):
    ours = uneven("st_moe", eval_capacity=2.0).train(training)
    theirs = wheel(ours).train(training)
    x = torch.randn(3, 64, 16, dtype=torch.float64)
    inputs = x.clone().requires_grad_(), x.clone().requires_grad_()
    with ffn.reports() as told:
        y = ours(inputs[0])
    assert told[0].counts["refused"] > 0
    found = theirs(inputs[1])
    leaves = ([inputs[0], ours.router.weight], [inputs[1], theirs.gate.to_gates.weight])
    values, wanted = [y], [found.outputs]
    if training:  # no losses in evaluation
        values.append(told[0].losses["z"])
        wanted.append(1e-3 * found.router_z_loss)
    assert_same(values, wanted, leaves, 1e-6)  # they have masks in float32


def test_the_wheel_balances_choices_within_the_capacity():
    """Unlike the paper's, its shares come from the mask of first choices after the capacity limit."""
    ours = uneven("st_moe")
    theirs, x = wheel(ours), torch.randn(3, 64, 16, dtype=torch.float64)
    with ffn.reports() as told:
        ours(x)
    logits = ours.logits(x)
    scores = logits.softmax(-1)
    first = F.one_hot(scores.argmax(-1), 8).double()
    room = first * (first.cumsum(1) <= ours.expert_capacity(64))
    assert distance(1e-2 * 8 * (first.mean(1) * scores.mean(1)).sum(-1).mean(), told[0].losses["balance"]) < 1e-12
    found = theirs(x).balance_loss
    assert distance(found, 8 * (room.mean(1) * scores.mean(1)).sum(-1).mean()) < 1e-6
    assert distance(1e-2 * found, told[0].losses["balance"]) > 0.05
