"""Reports of feed-forwards reach only active collectors."""

import torch
from torch.utils.checkpoint import checkpoint

from linattn.ffn import report, reports


def test_reports():
    loss, count = torch.tensor(1.0), torch.tensor(3)
    report({"balance": loss}, {"dropped": count})  # without a collector
    with reports() as outer:
        report({"balance": loss}, {"dropped": count})
        with reports() as inner:
            report({}, {"dropped": count})
        report({"z": loss}, {})
    assert [sorted({**r.losses, **r.counts}) for r in outer] == [["balance", "dropped"], ["z"]]
    assert [sorted(r.counts) for r in inner] == [["dropped"]]


def test_checkpointing_reports_once():
    """Recomputation in the backward pass is not reported."""
    x = torch.ones(2, requires_grad=True)

    def layer(x):
        report({"balance": x.sum()}, {})
        return x * x

    with reports() as collected:
        y = checkpoint(layer, x, use_reentrant=False)
    (y.sum() + sum(loss for r in collected for loss in r.losses.values())).backward()
    assert len(collected) == 1 and x.grad.tolist() == [3.0, 3.0]
