"""Results that are formed again in the backward pass: the gradients' bits, and what is kept until then."""

import gc
import weakref

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from linattn.ops.saved import formed_again


def layer(again: bool, formed: list | None = None, dtype=torch.float32):
    torch.manual_seed(0)
    first, second = nn.Linear(8, 32).to(dtype), nn.Linear(32, 8).to(dtype)

    def form(inner):
        if formed is not None:
            formed.append(weakref.ref(inner))
        return inner.square()

    def run(x):
        inner = first(x)
        y = form(inner)
        if formed is not None:
            formed.append(weakref.ref(y))
        if not again:
            return second(y)
        with formed_again(y, lambda: form(inner)):
            return second(y)

    return run, [*first.parameters(), *second.parameters()]


def gradients(again: bool, how=lambda run, x: run(x), **options):
    run, leaves = layer(again, **options)
    x = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(1), dtype=leaves[0].dtype).requires_grad_()
    return torch.autograd.grad(how(run, x).square().sum(), [x, *leaves])


def equal(these, those):
    assert all(torch.equal(a, b) for a, b in zip(these, those, strict=True))


def test_bits_of_gradients():
    equal(gradients(True), gradients(False))


def test_it_is_not_kept_and_formed_once_more():
    for again in (False, True):
        found = []
        run, leaves = layer(again, found)
        out = run(torch.randn(2, 3, 8))
        gc.collect()
        assert (found[1]() is None) == again
        count = len(found)
        torch.autograd.grad(out.sum(), leaves)
        assert len(found) == count + again


def test_inside_checkpoints_nothing_is_kept():
    found = []
    run, _ = layer(True, found)
    out = checkpoint(run, torch.randn(2, 3, 8, requires_grad=True), use_reentrant=False)
    gc.collect()
    assert all(t() is None for t in found)
    assert out.requires_grad
    equal(gradients(True, lambda run, x: checkpoint(run, x, use_reentrant=False)), gradients(False))


def test_second_derivatives():
    def second(again):
        run, leaves = layer(again, dtype=torch.float64)
        x = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64).requires_grad_()
        first = torch.autograd.grad(run(x).square().sum(), [x, *leaves], create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), [x, *leaves], allow_unused=True)

    for a, b in zip(second(True), second(False), strict=True):
        assert (a is None) == (b is None) and (a is None or torch.allclose(a, b, rtol=1e-12))


def test_compiled_graphs_have_no_hooks():
    run, _ = layer(True)
    x = torch.randn(2, 3, 8, requires_grad=True)
    equal([torch.compile(run, fullgraph=True, backend="aot_eager")(x)], [run(x)])
